// SPDX-License-Identifier: GPL-2.0-or-later
//! One question, one answer.

use crate::records;
use pliant_protocol::bridge::{Answer, Ask, UpdateFields};
use slurm::client::{Client, ClientError, Update};

/// EOPNOTSUPP: the question is of a newer protocol.
const UNKNOWN_QUESTION: i32 = 95;

pub fn answer(client: &Client, ask: Ask) -> Answer {
    serve(client, ask).unwrap_or_else(|error| Answer::Error { errno: error.errno, text: error.text })
}

fn serve(client: &Client, ask: Ask) -> Result<Answer, ClientError> {
    Ok(match ask {
        Ask::Ping => Answer::Pong { slurm: slurm::version() },
        Ask::Jobs => {
            let jobs = client.jobs()?;
            Answer::Jobs { as_of: jobs.as_of(), jobs: jobs.iter().map(|job| records::job(&job)).collect() }
        }
        Ask::Job { job: id } => match client.job(id) {
            Ok(jobs) => Answer::Jobs {
                as_of: jobs.as_of(),
                // An array's record brings its tasks with it.
                jobs: jobs.iter().map(|job| records::job(&job)).filter(|job| job.job_id == id).collect(),
            },
            Err(error) if error.is_unknown_job() => Answer::Jobs { as_of: 0, jobs: vec![] },
            Err(error) => return Err(error),
        },
        Ask::Nodes => {
            let nodes = client.nodes()?;
            Answer::Nodes {
                as_of: nodes.as_of(),
                nodes: nodes.iter().filter_map(|node| records::node(&node)).collect(),
            }
        }
        Ask::Partitions => {
            let partitions = client.partitions()?;
            let records = partitions.iter().filter_map(|partition| records::partition(&partition)).collect();
            Answer::Partitions { as_of: partitions.as_of(), partitions: records }
        }
        Ask::Update { job, fields } => {
            client.update(&job, &update(fields))?;
            Answer::Done
        }
        Ask::Cancel { job, signal, reason } => {
            if let Some(text) = reason {
                // A note for people who look at the job later: worth a try, and no condition of the kill.
                let note = Update { admin_comment: Some(text), ..Update::default() };
                if let Err(error) = client.update(&job, &note) {
                    eprintln!("pliant-slurm-bridge: job {job}: no note could be left in its admin comment: {error}");
                }
            }
            client.cancel(&job, signal)?;
            Answer::Done
        }
        _ => {
            return Err(ClientError {
                errno: UNKNOWN_QUESTION,
                text: "pliant-slurm-bridge is older than pliantd".into(),
            });
        }
    })
}

fn update(fields: UpdateFields) -> Update {
    let UpdateFields { comment, admin_comment, time_limit, nice, priority, req_nodes, exc_nodes } = fields;
    Update { comment, admin_comment, time_limit, nice, priority, req_nodes, exc_nodes }
}
