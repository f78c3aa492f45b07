//! Random programs of all verbs over several sessions, compared with a model of the state machine.
//!
//!     model --dsn "host=... user=postgres" [--steps N] SEED...        random programs
//!     model --dsn "host=... user=postgres" --program FILE...          programs as they were found
//!
//! Of a program that fails the shortest that still fails is printed, one step a line, as --program reads it.

mod driver;
mod model;
mod program;
mod random;
mod shrink;

use driver::Driver;
use program::Step;
use std::process::exit;
use std::sync::atomic::{AtomicU32, Ordering};

/// What a program came to.
pub struct Failure {
    /// The steps up to the one that failed.
    pub steps: Vec<Step>,
    pub why: String,
    pub log: Vec<String>,
}

pub struct Server {
    dsn: String,
    databases: AtomicU32,
}

impl Server {
    fn driver(&self) -> Driver {
        let n = self.databases.fetch_add(1, Ordering::Relaxed);
        let name = format!("model_{}_{n}", std::process::id());
        match Driver::new(&self.dsn, &name) {
            Ok(driver) => driver,
            Err(why) => {
                eprintln!("{why}");
                exit(2);
            }
        }
    }

    /// Runs steps as `next` makes them; at the end everything is looked at by every session.
    fn run(&self, mut next: impl FnMut(&Driver) -> Option<Step>) -> Result<usize, Failure> {
        let mut driver = self.driver();
        let mut steps = Vec::new();
        let mut outcome = Ok(());
        while let Some(step) = next(&driver) {
            match driver.step(&step) {
                Ok(false) => {}
                Ok(true) => steps.push(step),
                Err(why) => {
                    steps.push(step);
                    outcome = Err(why);
                    break;
                }
            }
        }
        if outcome.is_ok() {
            for s in 0..driver::SESSIONS {
                let step = Step::Check { s };
                if let Err(why) = driver.step(&step) {
                    steps.push(step);
                    outcome = Err(why);
                    break;
                }
            }
        }
        let log = std::mem::take(&mut driver.log);
        driver.drop();
        match outcome {
            Ok(()) => Ok(steps.len()),
            Err(why) => Err(Failure { steps, why, log }),
        }
    }

    pub fn replay(&self, steps: &[Step]) -> Result<usize, Failure> {
        let mut steps = steps.iter();
        self.run(|_| steps.next().cloned())
    }

    fn random(&self, seed: u64, mut left: usize) -> Result<usize, Failure> {
        let mut generator = random::Generator::new(seed);
        self.run(|driver| {
            if left == 0 {
                return None;
            }
            left -= 1;
            Some(generator.step(driver))
        })
    }
}

fn usage() -> ! {
    eprintln!("usage: model --dsn DSN [--steps N] [--no-shrink] SEED... | model --dsn DSN --program FILE...");
    exit(2);
}

fn read_program(file: &str) -> Vec<Step> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| {
        eprintln!("{file}: {e}");
        exit(2);
    });
    let lines = text.lines().map(str::trim);
    lines
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
        .map(|l| {
            serde_json::from_str(l).unwrap_or_else(|e| {
                eprintln!("{file}: {l}: {e}");
                exit(2);
            })
        })
        .collect()
}

fn report(name: &str, failure: &Failure) {
    println!("{name} FAILED: {}", failure.why);
    for step in &failure.steps {
        println!("{}", serde_json::to_string(step).unwrap_or_default());
    }
    println!("-- statements");
    for line in &failure.log {
        println!("{line}");
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (mut dsn, mut steps, mut shrinks, mut programs, mut seeds) = (None, 300, true, false, Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--dsn" => dsn = args.next(),
            "--steps" => {
                steps = args
                    .next()
                    .and_then(|n| n.parse().ok())
                    .unwrap_or_else(|| usage())
            }
            "--no-shrink" => shrinks = false,
            "--program" => programs = true,
            _ => seeds.push(arg),
        }
    }
    let server = Server {
        dsn: dsn.unwrap_or_else(|| usage()),
        databases: AtomicU32::new(0),
    };
    if seeds.is_empty() {
        usage();
    }
    let mut failed = false;
    for name in seeds {
        let outcome = if programs {
            server.replay(&read_program(&name))
        } else {
            server.random(name.parse().unwrap_or_else(|_| usage()), steps)
        };
        match outcome {
            Ok(n) => println!("{name}: {n} steps"),
            Err(failure) => {
                failed = true;
                println!("{name}: {} steps, then: {}", failure.steps.len(), failure.why);
                if shrinks && !programs {
                    report(&name, &shrink::shrink(&server, failure));
                } else {
                    report(&name, &failure);
                }
            }
        }
    }
    exit(i32::from(failed));
}
