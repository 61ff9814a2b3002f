"""What ranks do together: the collectives that each called, and who waited for whom."""
