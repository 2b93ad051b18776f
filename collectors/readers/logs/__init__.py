"""Parts of the log reader: prefixes, times, families of lines, blocks of several lines."""
