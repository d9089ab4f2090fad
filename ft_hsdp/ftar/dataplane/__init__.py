"""Data planes: who copies and adds the chunks of an all-reduce."""
