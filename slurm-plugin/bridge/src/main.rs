// SPDX-License-Identifier: GPL-2.0-or-later
//! `pliant-slurm-bridge`: libslurm behind frames on standard input and output (`pliant_protocol::bridge`).
//!
//! A child process of pliantd, because libslurm may end the process it is in (`fatal`) or wait for its own time-outs.
//! One question at a time, answered in order. It ends with 0 when its standard input closes and with 1 when what comes
//! in is no frame: pliantd starts another. Standard error takes libslurm's own log lines.
#![forbid(unsafe_code)]
#![deny(clippy::indexing_slicing)]

mod records;
mod serve;

use anyhow::Context;
use pliant_protocol::bridge::{Reply, Request};
use pliant_protocol::codec::{self, MAX_BRIDGE_FRAME};
use std::io::{self, BufReader, BufWriter, Write};

fn main() -> anyhow::Result<()> {
    let mut input = BufReader::new(io::stdin().lock());
    let mut output = BufWriter::new(io::stdout().lock());
    // Last thing before the loop: libslurm ends the process here where slurm.conf cannot be read.
    let client = slurm::client::Client::new();
    loop {
        let request: Option<Request> =
            codec::read_frame(&mut input, MAX_BRIDGE_FRAME).context("standard input holds no frame of pliantd")?;
        let Some(request) = request else {
            return Ok(());
        };
        let reply = Reply { id: request.id, answer: serve::answer(&client, request.ask) };
        codec::write_frame(&mut output, &reply).context("pliantd does not read")?;
        output.flush().context("pliantd does not read")?;
    }
}
