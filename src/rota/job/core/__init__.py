"""The decisions about one job: pure functions over values; nothing here touches the world."""
