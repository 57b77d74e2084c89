"""Measurements for people to read. One file per report; reports take data, never an engine."""
