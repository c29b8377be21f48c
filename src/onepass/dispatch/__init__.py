"""From a call to a launcher: routes, the cache of launchers, autograd, the front door in C++, torch.library, torch.compile."""
