"""From a call to a launcher: routes, the cache of launchers, autograd, torch.library, torch.compile."""
