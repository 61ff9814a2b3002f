"""A step split over several devices: the command `tieroff partition`, and modules placed as a partition says."""
