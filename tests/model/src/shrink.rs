//! The shortest program that still fails, found by leaving out steps: halves first, then smaller pieces.

use crate::program::Step;
use crate::{Failure, Server};

use std::time::{Duration, Instant};

/// How long shorter programs are tried.
const LONGEST: Duration = Duration::from_secs(40);

pub fn shrink(server: &Server, failure: Failure) -> Failure {
    let mut best = failure;
    let end = Instant::now() + LONGEST;
    let mut size = best.steps.len() / 2;
    while size > 0 && Instant::now() < end {
        let mut at = 0;
        let mut shorter = false;
        while at < best.steps.len() && Instant::now() < end {
            let next = (at + size).min(best.steps.len());
            let without = [&best.steps[..at], &best.steps[next..]].concat();
            match server.replay(&without) {
                // Of any failure: what is found on the way is as good.
                Err(found) => {
                    best = found;
                    shorter = true;
                }
                Ok(_) => at = next,
            }
        }
        if size == 1 && !shorter {
            break;
        }
        size = if size == 1 { 1 } else { size / 2 };
    }
    simpler(server, best, end)
}

/// The same steps with fewer jobs and receipts.
fn simpler(server: &Server, failure: Failure, end: Instant) -> Failure {
    let mut best = failure;
    let mut i = 0;
    while i < best.steps.len() {
        let mut changed = false;
        for step in smaller(&best.steps[i]) {
            if Instant::now() > end {
                return best;
            }
            let mut steps = best.steps.clone();
            steps[i] = step;
            if let Err(found) = server.replay(&steps) {
                if found.steps.len() <= best.steps.len() {
                    best = found;
                    changed = true;
                    break;
                }
            }
        }
        if !changed {
            i += 1;
        }
    }
    best
}

fn without<T: Clone>(list: &[T]) -> impl Iterator<Item = Vec<T>> + '_ {
    (0..list.len())
        .filter(|_| list.len() > 1)
        .map(|i| [&list[..i], &list[i + 1..]].concat())
}

fn smaller(step: &Step) -> Vec<Step> {
    match step.clone() {
        Step::Batch { s, jobs } => without(&jobs).map(|jobs| Step::Batch { s, jobs }).collect(),
        Step::Jobs { s, jobs } => without(&jobs).map(|jobs| Step::Jobs { s, jobs }).collect(),
        Step::Finish {
            s,
            verb,
            receipts,
            strict,
            reason,
            permanent,
            delay,
        } => without(&receipts)
            .map(|receipts| Step::Finish {
                s,
                verb,
                receipts,
                strict,
                reason,
                permanent,
                delay,
            })
            .collect(),
        Step::CompleteAndClaim {
            s,
            receipts,
            strict,
            queues,
            n,
        } => without(&receipts)
            .map(|receipts| Step::CompleteAndClaim {
                s,
                receipts,
                strict,
                queues: queues.clone(),
                n,
            })
            .collect(),
        Step::Begin { s, repeatable: true } => vec![Step::Begin { s, repeatable: false }],
        _ => Vec::new(),
    }
}
