"""One file per trainer. Importing ebbtide imports none of them, and needs none of the trainers' packages."""
