-- The organizations with QUEUED records, for `count_active`: its cost does not depend on those that are idle.
CREATE INDEX counts_active ON postroom.counts (queue)
    WHERE n > 0 AND counter IN ('P0', 'P1', 'P2', 'P3') AND left(queue, 4) = 'org:';
