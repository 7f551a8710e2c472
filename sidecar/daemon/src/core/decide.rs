//! One round: snapshot, decision, intent, order.

use super::{Core, ENFORCE_AFTER, Effect, Job, Now, RESIZE_EXPIRES, SERVED_FOR, Settings};
use crate::journal::Resize;
use crate::view;
use pliant_model::resize::{Kind, State};
use pliant_model::{JobId, NodeName, OrderId, Reason};
use pliant_policy::{Action, Plan};
use pliant_protocol::job::{Order, SliceSpec};
use pliant_protocol::peer;
use std::collections::BTreeSet;

impl Core {
    /// One round of decisions.
    pub(super) fn decide(&mut self, now: Now) {
        let Some((as_of, _)) = self.view_at else {
            return;
        };
        // What is left of an array keeps its id: each start of a task is a start.
        let waits =
            |id: &JobId| self.view.jobs.get(id).is_some_and(|j| j.state == "PENDING" && j.array_tasks.is_none());
        self.served.retain(|id, (_, last)| waits(id) && now.mono.saturating_sub(*last) < SERVED_FOR);
        let agents: BTreeSet<NodeName> = self.agents.keys().cloned().collect();
        let owned = |id: &JobId, j: &Job| self.view.active(*id).is_some_and(|r| r.user_id == j.uid);
        let jobs = self.jobs.iter().filter(|(id, j)| j.connected && owned(id, j));
        let lost = self.hardware.lost();
        let missing = self.hardware.missing();
        let held = self.hardware.held(&self.holders);
        let known = view::Known {
            jobs: jobs.map(|(_, j)| registered(j, now, self.settings)).collect(),
            resizes: &self.resizes,
            used: &self.used,
            agents: &agents,
            lost: &lost,
            missing: &missing,
            held: &held,
            fitting: &self.fitting,
            served: &self.served,
            now: now.mono,
            wall_to_mono: i64::try_from(now.mono).unwrap_or(0) - i64::try_from(now.wall_ms / 1000).unwrap_or(0),
        };
        let cluster = view::cluster(&self.view, &known, as_of);
        let config = pliant_policy::Config { stale_after: self.settings.stale_after, ..Default::default() };
        let plan = pliant_policy::decide(&cluster, &config, now.mono);
        self.fitting =
            plan.fitting.iter().map(|job| (*job, self.fitting.get(job).copied().unwrap_or(now.mono))).collect();
        self.notes = plan.notes.clone();
        let silent = self.jobs.iter().filter(|(_, j)| !j.connected).map(|(id, _)| *id);
        self.notes.extend(silent.map(|id| (id, Reason::NoLauncher)));
        if self.durable {
            for job in &plan.served {
                let (times, _) = self.served.get(job).copied().unwrap_or_default();
                self.served.insert(*job, (times + 1, now.mono));
            }
            self.begin(plan, now);
        } else {
            // One small write tells whether the journal works again.
            let probe = self.journal.probe();
            self.durable_after(probe);
        }
    }

    pub(super) fn begin(&mut self, plan: Plan, now: Now) {
        for action in plan.actions {
            let id = OrderId((self.next_id)());
            let (base, order, slices, reason) = match action {
                Action::Grow { base, slices, reason } => {
                    let specs = slices.into_iter().map(|(node, gpus)| SliceSpec { node, gpus }).collect();
                    let patience = self.settings.patience;
                    (base, Order::Grow { id, slices: specs, patience, reason: reason.clone() }, vec![], reason)
                }
                Action::Shrink { base, slices, reason } => {
                    let grace = self.jobs.get(&base).map_or(60, |j| j.status.grace);
                    let order = Order::Shrink { id, slices: slices.clone(), grace, reason: reason.clone() };
                    (base, order, slices, reason)
                }
            };
            self.order(base, order, slices, &reason, now);
        }
    }

    /// Makes an order durable, then sends it.
    pub(super) fn order(&mut self, base: JobId, order: Order, slices: Vec<JobId>, reason: &Reason, now: Now) {
        let Some(job) = self.jobs.get_mut(&base) else {
            return;
        };
        let lent = |keep: fn(bool) -> bool| -> u32 {
            job.status
                .slices
                .iter()
                .filter(|s| keep(slices.contains(&s.job)))
                .map(|s| s.gpus)
                .fold(0, u32::saturating_add)
        };
        let before = job.status.base_gpus + lent(|_| true);
        let after = match &order {
            Order::Grow { slices, .. } => before + slices.iter().map(|s| s.gpus).sum::<u32>(),
            Order::Shrink { .. } => job.status.base_gpus + lent(|going| !going),
        };
        let resize = Resize {
            id: order.id().clone(),
            base,
            instance: job.status.instance.clone(),
            kind: order.kind(),
            state: State::Proposed,
            order: Some(order.clone()),
            slices,
            before,
            after,
            started_ms: now.wall_ms,
        };
        let begun = self.resizes.begin(resize, reason, &mut self.journal);
        if self.durable_after(begun).is_none() {
            return;
        }
        let Some(job) = self.jobs.get_mut(&base) else {
            return;
        };
        tracing::info!(job = base.0, kind = %order.kind(), from = before, to = after, order = %order.id(), "{reason}");
        job.sent = now.mono;
        job.enforce_at = (order.kind() == Kind::Shrink).then_some(now.mono + job.status.grace + ENFORCE_AFTER);
        let (node, instance) = (job.node.clone(), job.status.instance.clone());
        self.notes.insert(base, Reason::InFlight { order: order.id().clone() });
        self.out.push(Effect::Agent(node, peer::ToAgent::Order { base, instance, order }));
    }
}

fn registered<'a>(job: &'a Job, now: Now, settings: Settings) -> view::Registered<'a> {
    let begun = job.status.order.as_ref().and_then(|o| o.times.first()).map_or(now.wall_ms, |(_, t)| *t);
    let limit = (settings.grace_max + RESIZE_EXPIRES) * 1000;
    let busy = now.wall_ms.saturating_sub(begun) < limit;
    view::Registered { status: &job.status, retry_at: job.retry_at, busy, avoid: &job.avoid }
}
