"""All ranks of a launch on one page: a step of each, and who waited for whom."""
