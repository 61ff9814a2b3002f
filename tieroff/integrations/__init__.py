"""What joins wrapped models to trainers that people use. Each module needs its library: import the one you want."""
