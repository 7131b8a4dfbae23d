CREATE TABLE schema_version (
  component TEXT NOT NULL,
  version INTEGER NOT NULL,
  PRIMARY KEY (component)
);
CREATE TABLE runs (
  id TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  PRIMARY KEY (id)
);
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
  reward_id INTEGER,
  reward DOUBLE,
  provenance TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  finished_at DOUBLE,
  PRIMARY KEY (id)
);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_run ON trajectories (run, created_at);
CREATE TABLE feedback (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  trajectory TEXT NOT NULL,
  kind TEXT NOT NULL,
  value DOUBLE,
  data TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE INDEX ix_feedback_trajectory ON feedback (trajectory);
CREATE TABLE groups (
  run TEXT NOT NULL,
  id TEXT NOT NULL,
  task_id TEXT NOT NULL,
  size INTEGER NOT NULL,
  state TEXT NOT NULL,
  min_version INTEGER NOT NULL,
  step INTEGER,
  created_at DOUBLE NOT NULL,
  ready_at DOUBLE,
  PRIMARY KEY (run, id),
  FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE INDEX groups_by_state ON groups (run, state, ready_at, id);
CREATE TABLE rewards (
  id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
  trajectory TEXT NOT NULL,
  value DOUBLE NOT NULL,
  parts TEXT NOT NULL,
  evidence TEXT NOT NULL,
  grader TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE INDEX ix_rewards_trajectory ON rewards (trajectory);
CREATE TABLE steps (
  run TEXT NOT NULL,
  number INTEGER NOT NULL,
  line TEXT NOT NULL,
  groups TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  PRIMARY KEY (run, number),
  FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE commits (
  run TEXT NOT NULL,
  step INTEGER NOT NULL,
  line TEXT NOT NULL,
  number INTEGER NOT NULL,
  digest TEXT NOT NULL,
  created_at DOUBLE NOT NULL,
  PRIMARY KEY (run, step, line),
  FOREIGN KEY(run, step) REFERENCES steps (run, number)
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
CREATE INDEX ledger_by_group ON ledger (run, group_id);
CREATE INDEX ledger_by_state ON ledger (run, state, step);
CREATE TABLE step_trajectories (
  run TEXT NOT NULL,
  trajectory TEXT NOT NULL,
  step INTEGER NOT NULL,
  position INTEGER NOT NULL,
  reward_id INTEGER NOT NULL,
  reward DOUBLE NOT NULL,
  advantage DOUBLE NOT NULL,
  PRIMARY KEY (run, trajectory),
  FOREIGN KEY(run, step) REFERENCES steps (run, number),
  FOREIGN KEY(trajectory) REFERENCES trajectories (id),
  FOREIGN KEY(reward_id) REFERENCES rewards (id)
);
CREATE UNIQUE INDEX step_trajectories_by_step ON step_trajectories (run, step, position);
INSERT INTO schema_version VALUES ('trajectories', 1);
INSERT INTO runs VALUES ('run', 1700000000.25);
INSERT INTO trajectories VALUES ('run-000000-0', 'run', 'run-000000', 'bug/7', 'rollout', 'train', 'bug', 'graded', NULL, 'trajectories/run-000000-0.zst', 'submissions/run-000000-0.json', 20, 11, 3, 'main', 'bf16', 3, 4, 'start,summary', 'home', 1, 1.0, '{"split":"train"}', 1700000001.5, 1700000009.5);
INSERT INTO trajectories VALUES ('run-000000-1', 'run', 'run-000000', 'bug/7', 'rollout', 'train', 'bug', 'failed', 'machine gone', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{}', 1700000001.5, NULL);
INSERT INTO trajectories VALUES ('run-000001-0', 'run', 'run-000001', 'bug/8', 'rollout', 'train', 'bug', 'running', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{}', 1700000002.5, NULL);
INSERT INTO rewards (trajectory, value, parts, evidence, grader, created_at) VALUES ('run-000000-0', 1.0, '{"tests":1.0}', '{"output":"3 passed"}', 'hidden', 1700000010.5);
INSERT INTO feedback (trajectory, kind, value, data, created_at) VALUES ('run-000000-0', 'thumb', 1.0, '{"by":"user"}', 1700000020.5);
INSERT INTO groups VALUES ('run', 'run-000000', 'bug/7', 2, 'final', 0, 1, 1700000001.5, 1700000011.5);
INSERT INTO groups VALUES ('run', 'run-000001', 'bug/8', 1, 'running', 1, NULL, 1700000002.5, NULL);
INSERT INTO ledger VALUES ('run', 'run-000000-0', 'run-000000', 'trained', NULL, 1);
INSERT INTO ledger VALUES ('run', 'run-000000-1', 'run-000000', 'dropped', 'failed: machine gone', 1);
INSERT INTO ledger VALUES ('run', 'run-000001-0', 'run-000001', 'admitted', NULL, NULL);
INSERT INTO steps VALUES ('run', 1, 'main', '["run-000000"]', 1700000012.5);
INSERT INTO step_trajectories VALUES ('run', 'run-000000-0', 1, 0, 1, 1.0, 0.5);
INSERT INTO commits VALUES ('run', 1, 'main', 1, 'digest', 1700000013.5);
