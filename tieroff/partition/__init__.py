"""A step split over several devices: modules placed as a partition says."""
