//! Random steps that fit to where the model stands.

use crate::driver::{Driver, SESSIONS, WORKERS};
use crate::program::{Held, Spec, Step, Tag, Verb};

/// splitmix64, by Vigna.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    fn of<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn maybe<T>(&mut self, percent: usize, make: impl FnOnce(&mut Random) -> T) -> Option<T> {
        self.chance(percent).then(|| make(self))
    }
}

pub struct Generator {
    pub random: Random,
    next_tag: Tag,
}

impl Generator {
    pub fn new(seed: u64) -> Generator {
        Generator {
            random: Random::new(seed),
            next_tag: 1,
        }
    }

    fn spec(&mut self, queue: usize, sharded: bool) -> Spec {
        let r = &mut self.random;
        let tag = self.next_tag;
        self.next_tag += 1;
        Spec {
            tag,
            queue,
            priority: r.maybe(30, |r| r.of(&[1, 2, 3, 4])),
            max_attempts: r.maybe(30, |r| r.of(&[1, 2, 3])),
            key: r.maybe(if sharded { 80 } else { 20 }, |r| {
                r.of(&["a", "b", "c", "ä 'x'"]).to_string()
            }),
            run_in: r.maybe(20, |r| r.of(&[-100, 30, 50, 100, 1000, 50_000])),
            run_at: r.chance(50),
        }
    }

    fn held(&mut self, driver: &Driver) -> Vec<Held> {
        let all = driver.model.all_held();
        let open: Vec<Held> = all.iter().filter(|h| h.1).map(|h| h.0).collect();
        let n = self.random.of(&[1, 1, 2, 3, 8]);
        let mut held = Vec::new();
        for _ in 0..n {
            let from_open = self.random.chance(85) && !open.is_empty();
            if from_open {
                let near = open.len().saturating_sub(12);
                held.push(open[near + self.random.below(open.len() - near)]);
            } else if !all.is_empty() {
                held.push(all[self.random.below(all.len())].0);
            }
        }
        held
    }

    fn queues_of(&mut self, n: usize) -> Vec<usize> {
        if self.random.chance(75) {
            return vec![self.random.below(n)];
        }
        let mut queues: Vec<usize> = (0..n).filter(|_| self.random.chance(70)).collect();
        if queues.is_empty() {
            queues.push(0);
        }
        queues
    }

    fn jobs(&mut self, driver: &Driver) -> Vec<Tag> {
        let all: Vec<Tag> = driver.model.jobs.keys().copied().collect();
        let n = self.random.of(&[1, 1, 2, 4]);
        (0..n)
            .filter(|_| !all.is_empty())
            .map(|_| {
                let near = all.len().saturating_sub(25);
                let from = if self.random.chance(80) { near } else { 0 };
                all[from + self.random.below(all.len() - from)]
            })
            .collect()
    }

    pub fn step(&mut self, driver: &Driver) -> Step {
        let s = self.random.below(SESSIONS);
        let session = &driver.model.sessions[s];
        if session.failed {
            return if session.savepoints() > 0 && self.random.chance(60) {
                Step::RollbackTo { s }
            } else {
                Step::Rollback { s }
            };
        }
        if session.in_transaction() {
            match self.random.below(100) {
                0..=11 => return Step::Commit { s },
                12..=17 => return Step::Rollback { s },
                18..=24 => return Step::Savepoint { s },
                25..=29 => return Step::RollbackTo { s },
                30..=32 => return Step::ReleaseSavepoint { s },
                _ => {}
            }
        }
        let n = driver.model.queues.len();
        let queue = self.random.below(n);
        let sharded = driver.model.queues[queue].shards > 1;
        match self.random.below(1000) {
            0..=69 => Step::Begin {
                s,
                repeatable: self.random.chance(25),
            },
            70..=159 => Step::Enqueue {
                s,
                job: self.spec(queue, sharded),
            },
            160..=229 => {
                let n = 1 + self.random.below(12);
                Step::Batch {
                    s,
                    jobs: (0..n).map(|_| self.spec(queue, sharded)).collect(),
                }
            }
            230..=269 => {
                let k = 1 + self.random.below(8);
                let jobs = (0..k)
                    .map(|_| {
                        let q = self.random.below(n);
                        self.spec(q, driver.model.queues[q].shards > 1)
                    })
                    .collect();
                Step::Jobs { s, jobs }
            }
            270..=449 => Step::Claim {
                s,
                queues: self.queues_of(n),
                n: self.random.of(&[0, 1, 1, 2, 3, 5, 20]),
                lease: self.random.maybe(30, |r| r.of(&[20, 60, 300, 2000])),
                worker: self.random.of(&WORKERS).to_string(),
            },
            450..=679 => Step::Finish {
                s,
                verb: self.random.of(&[
                    Verb::Complete,
                    Verb::Complete,
                    Verb::Fail,
                    Verb::Fail,
                    Verb::Snooze,
                    Verb::Release,
                    Verb::CancelClaimed,
                ]),
                receipts: self.held(driver),
                strict: self.random.chance(10),
                reason: self.random.chance(70),
                permanent: self.random.chance(15),
                delay: self.random.maybe(40, |r| r.of(&[0, 30, 100, 5000])),
            },
            680..=739 => Step::CompleteAndClaim {
                s,
                receipts: self.held(driver),
                strict: self.random.chance(10),
                queues: self.queues_of(n),
                n: self.random.of(&[0, 1, 3, 10]),
            },
            740..=779 => Step::Heartbeat {
                s,
                receipts: self.held(driver),
                lease: self.random.maybe(60, |r| r.of(&[10, 100, 1000, 10_000])),
            },
            780..=789 => Step::ExpireLeases {
                s,
                worker: self.random.of(&WORKERS).to_string(),
            },
            790..=819 => Step::Cancel {
                s,
                jobs: self.jobs(driver),
                reason: self.random.chance(50),
            },
            820..=849 => Step::Retry {
                s,
                jobs: self.jobs(driver),
                run_in: self.random.maybe(30, |r| r.of(&[-10, 60, 900])),
            },
            850..=857 => Step::Pause { s, queue },
            858..=871 => match (0..n).find(|q| driver.model.paused[*q]) {
                Some(queue) => Step::Resume { s, queue },
                None => Step::Check { s },
            },
            872..=886 => Step::Forward {
                by: self.random.of(&[15, 70, 400, 4000, 20_000]),
            },
            887..=921 => Step::Maintain { s },
            922..=939 => Step::Seal { s },
            940..=954 => Step::Close {
                s,
                slot: self.random.below(4) as u8,
            },
            955..=969 => Step::Empty {
                s,
                slot: self.random.below(4) as u8,
            },
            970..=977 => Step::Reconnect { s },
            _ => Step::Check { s },
        }
    }
}
