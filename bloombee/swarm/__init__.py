"""Identity, DHT records and the live view of who serves what."""
