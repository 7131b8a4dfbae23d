CREATE TABLE trajectories (
	id TEXT NOT NULL,
	run TEXT NOT NULL,
	group_id TEXT NOT NULL,
	task_id TEXT NOT NULL,
	traffic TEXT NOT NULL,
	split TEXT,
	family TEXT,
	state TEXT NOT NULL,
	reason TEXT,
	payload_key TEXT,
	submission_key TEXT,
	tokens INTEGER,
	sampled_tokens INTEGER,
	segments INTEGER,
	line TEXT,
	form TEXT,
	oldest_version INTEGER,
	newest_version INTEGER,
	causes TEXT,
	regions TEXT,
	reward_id BIGINT,
	reward DOUBLE PRECISION,
	provenance TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	finished_at DOUBLE PRECISION,
	solved BOOLEAN,
	grading BIGINT,
	turns INTEGER,
	PRIMARY KEY (id)
);
CREATE TABLE gradings (
	id BIGSERIAL NOT NULL,
	run TEXT NOT NULL,
	rewards TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE runs (
	id TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	started INTEGER DEFAULT '0' NOT NULL,
	changes BIGINT DEFAULT '0' NOT NULL,
	PRIMARY KEY (id)
);
CREATE TABLE keys (
	id TEXT NOT NULL,
	run TEXT NOT NULL,
	hash TEXT NOT NULL,
	name TEXT NOT NULL,
	scopes TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	expires_at DOUBLE PRECISION,
	revoked_at DOUBLE PRECISION,
	requests_per_minute INTEGER,
	tokens_per_minute INTEGER,
	budget_tokens BIGINT,
	used_tokens BIGINT NOT NULL,
	consent TEXT,
	PRIMARY KEY (id)
);
CREATE TABLE cycles (
	run TEXT NOT NULL,
	number INTEGER NOT NULL,
	state TEXT NOT NULL,
	facts TEXT NOT NULL,
	started_at DOUBLE PRECISION NOT NULL,
	updated_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, number)
);
CREATE TABLE splits (
	run TEXT NOT NULL,
	model TEXT NOT NULL,
	weights TEXT NOT NULL,
	updated_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, model)
);
CREATE TABLE engines (
	fleet TEXT NOT NULL,
	name TEXT NOT NULL,
	url TEXT NOT NULL,
	region TEXT NOT NULL,
	kind TEXT NOT NULL,
	form TEXT NOT NULL,
	wire INTEGER NOT NULL,
	capacity INTEGER NOT NULL,
	expires_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (fleet, name)
);
CREATE TABLE dispatchers (
	run TEXT NOT NULL,
	name TEXT NOT NULL,
	process TEXT NOT NULL,
	expires_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, name)
);
CREATE TABLE rewards (
	id BIGSERIAL NOT NULL,
	trajectory TEXT NOT NULL,
	value DOUBLE PRECISION NOT NULL,
	parts TEXT NOT NULL,
	evidence TEXT NOT NULL,
	grader TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	grading BIGINT,
	PRIMARY KEY (id),
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE TABLE feedback (
	id BIGSERIAL NOT NULL,
	trajectory TEXT NOT NULL,
	kind TEXT NOT NULL,
	value DOUBLE PRECISION,
	data TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	given_id TEXT,
	PRIMARY KEY (id),
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE TABLE groups (
	run TEXT NOT NULL,
	id TEXT NOT NULL,
	task_id TEXT NOT NULL,
	size INTEGER NOT NULL,
	state TEXT NOT NULL,
	min_version INTEGER NOT NULL,
	step INTEGER,
	created_at DOUBLE PRECISION NOT NULL,
	ready_at DOUBLE PRECISION,
	origin TEXT,
	holder TEXT,
	changed BIGINT DEFAULT '0' NOT NULL,
	PRIMARY KEY (run, id),
	FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE steps (
	run TEXT NOT NULL,
	number INTEGER NOT NULL,
	line TEXT NOT NULL,
	groups TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	lr DOUBLE PRECISION,
	PRIMARY KEY (run, number),
	FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE cycle_moves (
	run TEXT NOT NULL,
	number INTEGER NOT NULL,
	position INTEGER NOT NULL,
	state TEXT NOT NULL,
	reason TEXT NOT NULL,
	at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, number, position),
	FOREIGN KEY(run, number) REFERENCES cycles (run, number)
);
CREATE TABLE ledger (
	run TEXT NOT NULL,
	trajectory TEXT NOT NULL,
	group_id TEXT NOT NULL,
	state TEXT NOT NULL,
	reason TEXT,
	step INTEGER,
	PRIMARY KEY (run, trajectory),
	FOREIGN KEY(run, group_id) REFERENCES groups (run, id),
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE TABLE step_trajectories (
	run TEXT NOT NULL,
	trajectory TEXT NOT NULL,
	step INTEGER NOT NULL,
	position INTEGER NOT NULL,
	reward_id BIGINT NOT NULL,
	reward DOUBLE PRECISION NOT NULL,
	advantage DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, trajectory),
	FOREIGN KEY(run, step) REFERENCES steps (run, number),
	FOREIGN KEY(trajectory) REFERENCES trajectories (id),
	FOREIGN KEY(reward_id) REFERENCES rewards (id)
);
CREATE TABLE commits (
	run TEXT NOT NULL,
	step INTEGER NOT NULL,
	line TEXT NOT NULL,
	number INTEGER NOT NULL,
	digest TEXT NOT NULL,
	created_at DOUBLE PRECISION NOT NULL,
	PRIMARY KEY (run, step, line),
	FOREIGN KEY(run, step) REFERENCES steps (run, number)
);
CREATE UNIQUE INDEX feedback_by_given_id ON feedback (trajectory, given_id);
CREATE INDEX groups_by_change ON groups (run, changed);
CREATE INDEX groups_by_state ON groups (run, state, ready_at, id);
CREATE INDEX groups_by_step ON groups (run, state, step);
CREATE INDEX ix_feedback_trajectory ON feedback (trajectory);
CREATE INDEX ix_rewards_trajectory ON rewards (trajectory);
CREATE INDEX keys_by_run ON keys (run, created_at);
CREATE INDEX ledger_by_group ON ledger (run, group_id);
CREATE INDEX ledger_by_state ON ledger (run, state, step);
CREATE INDEX ledger_by_step ON ledger (run, step);
CREATE INDEX ledger_by_trajectory ON ledger (trajectory);
CREATE UNIQUE INDEX step_trajectories_by_step ON step_trajectories (run, step, position);
CREATE INDEX trajectories_by_age ON trajectories (created_at, id);
CREATE INDEX trajectories_by_end ON trajectories (run, finished_at, id);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_run ON trajectories (run, created_at);
