class DiskStore:
    pass
