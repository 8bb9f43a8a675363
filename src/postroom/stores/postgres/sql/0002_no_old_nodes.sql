-- Nodes of the knowledge graph are keyed by organization. No release wrote others on PostgreSQL, so nothing is moved:
-- a move would lose what workers of the previous version write meanwhile (rule 2 of 0001).
DO $$ BEGIN
    IF EXISTS (SELECT 1 FROM postroom.cells WHERE kind = 'graph.main') THEN
        RAISE EXCEPTION 'its knowledge graph is that of an unreleased version, and is not upgraded: use another schema';
    END IF;
END $$;
