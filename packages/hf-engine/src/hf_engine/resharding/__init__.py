"""Weight resharding: `boxes`, `layouts`, `plan` and `rounds` are pure arithmetic, `execute` moves the bytes."""
