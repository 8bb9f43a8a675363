-- Nodes of the knowledge graph are keyed by organization: two organizations may use the same node id.
-- The organization is the last field of a node, and has no character that JSON escapes. A shared node has none.
CREATE TABLE postroom.moved_nodes AS
SELECT key, value, coalesce(substring(convert_from(value, 'UTF8') FROM ',"org_id":"([^"\\]*)"\}$'), '') AS org_id
FROM postroom.cells WHERE kind = 'graph.main';
INSERT INTO postroom.cells SELECT 'graph.node', org_id || chr(31) || key, value FROM postroom.moved_nodes;
INSERT INTO postroom.cells
SELECT 'graph.owner', key || chr(31) || org_id, 'true'::bytea FROM postroom.moved_nodes WHERE org_id <> '';
-- The key of an old version is the node id, the separator, and a version of main of 20 digits.
INSERT INTO postroom.cells
SELECT 'graph.past', node.org_id || chr(31) || past.key, past.value
FROM postroom.cells AS past JOIN postroom.moved_nodes AS node ON node.key = left(past.key, -21)
WHERE past.kind = 'graph.history';
INSERT INTO postroom.cells
SELECT 'graph.past_at', right(past.key, 20) || chr(31) || node.org_id || chr(31) || node.key, 'true'::bytea
FROM postroom.cells AS past JOIN postroom.moved_nodes AS node ON node.key = left(past.key, -21)
WHERE past.kind = 'graph.history';
DELETE FROM postroom.cells WHERE kind IN ('graph.main', 'graph.history', 'graph.history_at');
DROP TABLE postroom.moved_nodes;
