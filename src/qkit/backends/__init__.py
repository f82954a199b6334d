"""The backends; each is imported when it is opened, so that none needs another's driver."""
