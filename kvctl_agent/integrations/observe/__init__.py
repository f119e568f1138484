"""Mode observe, which all engines share: hooks on an engine's own classes, their events, and the observed rank."""
