"""Slow and plainly right forms of the selective scan, to compare the others with; import each where it is used."""
