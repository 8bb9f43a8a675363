-- Streamed answers are many and large: in a table of their own they do not spread the small cells over many pages.

CREATE TABLE chunks (
    kind  TEXT NOT NULL,
    key   TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;
INSERT INTO chunks SELECT kind, key, value FROM cells WHERE kind = 'engine.chunk';
DELETE FROM cells WHERE kind IN ('engine.chunk', 'engine.part');
