-- CRC-32 of stored values: see stores/checksums.py. NULL for values that an earlier version wrote.
-- `payload_crc` covers what the sender gave: type, parent, key, sender and payload. `trail_crc` has one for each of the
-- newest lines of the trail.

ALTER TABLE records ADD COLUMN payload_crc;
ALTER TABLE records ADD COLUMN result_crc;
ALTER TABLE records ADD COLUMN trail_crc;
ALTER TABLE events ADD COLUMN crc;
ALTER TABLE cells ADD COLUMN crc;
ALTER TABLE chunks ADD COLUMN crc;
