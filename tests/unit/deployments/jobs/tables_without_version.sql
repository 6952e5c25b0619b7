-- The tables of jobs as they were before they had a version.
CREATE TABLE IF NOT EXISTS jobs_owner (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL) STRICT;
INSERT OR IGNORE INTO jobs_owner VALUES (1, 0);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, path TEXT NOT NULL,
    model TEXT NOT NULL, headers TEXT NOT NULL, meta TEXT NOT NULL, state TEXT NOT NULL,
    created_s REAL NOT NULL, deadline_s REAL NOT NULL, keep_s REAL NOT NULL,
    begun_s REAL, ended_s REAL, epoch INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, body_bytes INTEGER NOT NULL DEFAULT 0,
    event_count INTEGER NOT NULL DEFAULT 0, event_bytes INTEGER NOT NULL DEFAULT 0,
    result_bytes INTEGER NOT NULL DEFAULT 0,
    status INTEGER, content_type TEXT, error TEXT) STRICT;
CREATE INDEX IF NOT EXISTS jobs_by_tenant ON jobs (tenant, kind, created_s);
CREATE INDEX IF NOT EXISTS jobs_open ON jobs (created_s)
    WHERE state IN ('queued', 'in_progress', 'cancelling');
CREATE TABLE IF NOT EXISTS job_files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    state TEXT NOT NULL, bytes INTEGER NOT NULL, created_s REAL NOT NULL,
    expires_s REAL) STRICT;
CREATE INDEX IF NOT EXISTS job_files_by_tenant ON job_files (tenant, created_s);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    window TEXT NOT NULL, metadata TEXT NOT NULL, output_expiry REAL NOT NULL,
    state TEXT NOT NULL, errors TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, usage TEXT NOT NULL DEFAULT '{}',
    models TEXT NOT NULL DEFAULT '[]', outcome TEXT NOT NULL DEFAULT '',
    output_file TEXT NOT NULL, error_file TEXT NOT NULL,
    output_bytes INTEGER NOT NULL DEFAULT 0, error_bytes INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL, deadline_s REAL NOT NULL,
    times TEXT NOT NULL DEFAULT '{}') STRICT;
CREATE INDEX IF NOT EXISTS batches_by_tenant ON batches (tenant, created_s);
CREATE INDEX IF NOT EXISTS batches_open ON batches (created_s)
    WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling');
CREATE TABLE IF NOT EXISTS batch_lines (
    batch TEXT NOT NULL, model TEXT NOT NULL, served TEXT NOT NULL, number INTEGER NOT NULL,
    offset INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (batch, model, served, number)) STRICT, WITHOUT ROWID;
