"""Functions whose calls a test sees."""


def spy(monkeypatch, owner, name, note):
    """Let `note` see the arguments of each call of a function before it runs."""
    function = getattr(owner, name)

    def noted(*args, **options):
        note(*args, **options)
        return function(*args, **options)

    monkeypatch.setattr(owner, name, noted)
