"""placeholder"""


class StoredGraph:
    pass


class Workspace:
    pass


def open_output(*a):
    return {}
