"""`tieroff launch`: several ranks of one script on this machine, under torch's elastic agent."""
