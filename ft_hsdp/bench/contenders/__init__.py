"""One all-reduce each, behind `ft_hsdp.bench.contenders.base.Rank`."""
