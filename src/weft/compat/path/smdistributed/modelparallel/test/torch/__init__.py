"""What tests of the original offer to scripts."""
