"""The NATS server, and the mail server on top of it.

The NATS server itself knows no mailbox: Mail is the handler of its subjects. Of the other rooms of the
server, only `access` and the listeners of `http` may be imported.
"""
