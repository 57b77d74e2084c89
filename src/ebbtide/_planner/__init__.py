"""What a step is made of, what a plan would make of it, and the plan that makes the best of it.

profile, options, simulate and solve are pure: data in, data out, no device. measure fills a profile, control goes from
profile to plan and looks after it.
"""
