"""Slow and plainly right forms of the selective scan, to compare the others with; import each module where it is used."""
