"""One all-reduce each, behind `ft_hsdp.bench.rank.Rank`."""
