"""Files that others wrote: what is in them is looked at before it is believed."""
