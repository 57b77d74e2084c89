"""One file per trainer, imported by whoever uses it: none of their packages is needed to import ebbtide."""
