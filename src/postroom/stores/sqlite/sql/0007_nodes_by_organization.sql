-- Nodes of the knowledge graph are keyed by organization: two organizations may use the same node id.
INSERT INTO cells
SELECT 'graph.node', coalesce(json_extract(CAST(value AS TEXT), '$.org_id'), '') || char(31) || key, value
FROM cells WHERE kind = 'graph.main';
INSERT INTO cells
SELECT 'graph.owner', key || char(31) || json_extract(CAST(value AS TEXT), '$.org_id'), CAST('true' AS BLOB)
FROM cells WHERE kind = 'graph.main' AND json_extract(CAST(value AS TEXT), '$.org_id') IS NOT NULL;
-- The key of an old version is the node id, the separator, and a version of main of 20 digits.
INSERT INTO cells
SELECT 'graph.past', coalesce(json_extract(CAST(node.value AS TEXT), '$.org_id'), '') || char(31) || past.key, past.value
FROM cells AS past
JOIN cells AS node ON node.kind = 'graph.main' AND node.key = substr(past.key, 1, length(past.key) - 21)
WHERE past.kind = 'graph.history';
INSERT INTO cells
SELECT
    'graph.past_at',
    substr(past.key, -20) || char(31) || coalesce(json_extract(CAST(node.value AS TEXT), '$.org_id'), '') || char(31) || node.key,
    CAST('true' AS BLOB)
FROM cells AS past
JOIN cells AS node ON node.kind = 'graph.main' AND node.key = substr(past.key, 1, length(past.key) - 21)
WHERE past.kind = 'graph.history';
DELETE FROM cells WHERE kind IN ('graph.main', 'graph.history', 'graph.history_at');
