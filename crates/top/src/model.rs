//! Answers of the controller, and rates that are computed from them.

use std::collections::{BTreeMap, VecDeque};

use coreward_api::types::{Loads, ServerLoads, Status};

/// Maximum number of load samples over which a rate is computed. They span several seconds, because load balancers
/// report once per second.
const MAX_SAMPLES_PER_RATE: usize = 6;

/// Newest answers of the controller, whose contents the page shows.
#[derive(Debug, Default)]
pub struct PageModel {
    /// Newest status of the fleet: everything except the loads.
    pub status: Option<Status>,
    /// Load samples from the oldest to the newest. All are from the same run of the controller.
    load_samples: VecDeque<Loads>,
    pub request_problem: Option<String>,
}

/// Answer of the controller to a request, or the error of the request.
#[derive(Debug)]
pub enum ControllerAnswer {
    /// Status of the fleet: everything except the loads.
    Status(Box<Status>),
    Loads(Loads),
    Problem(String),
}

impl PageModel {
    pub fn apply_controller_answer(&mut self, answer: ControllerAnswer) {
        match answer {
            ControllerAnswer::Problem(problem) => self.request_problem = Some(problem),
            ControllerAnswer::Status(status) => {
                self.request_problem = None;
                self.status = Some(*status);
            }
            ControllerAnswer::Loads(loads) => {
                self.request_problem = None;
                // The counters begin at 0 again after a restart of the controller.
                if self.load_samples.back().is_some_and(|newest_sample| loads.uptime_ms <= newest_sample.uptime_ms) {
                    self.load_samples.clear();
                }
                self.load_samples.push_back(loads);
                while self.load_samples.len() > MAX_SAMPLES_PER_RATE {
                    self.load_samples.pop_front();
                }
            }
        }
    }

    pub fn newest_loads(&self) -> Option<&Loads> {
        self.load_samples.back()
    }

    pub fn server_loads_by_name(&self) -> BTreeMap<&str, &ServerLoads> {
        self.newest_loads()
            .into_iter()
            .flat_map(|loads| &loads.servers)
            .map(|server| (server.name.as_str(), server))
            .collect()
    }

    /// Returns the rate of new connections of each server, per second, by the server's name.
    pub fn new_connection_rates_by_server(&self) -> BTreeMap<&str, f64> {
        let new_connection_count = |loads: &'_ ServerLoads| loads.new_connections;
        let Some((oldest, newest, seconds)) = self.oldest_and_newest_load_samples() else { return BTreeMap::new() };
        let old_counts: BTreeMap<&str, u64> =
            oldest.servers.iter().map(|server| (&*server.name, new_connection_count(server))).collect();
        let compute_new_connection_rate = |server: &ServerLoads| {
            Some(new_connection_count(server).saturating_sub(*old_counts.get(&*server.name)?) as f64 / seconds)
        };
        newest.servers.iter().filter_map(|server| Some((&*server.name, compute_new_connection_rate(server)?))).collect()
    }

    /// Returns the packet rates of a load balancer, per second, by the name of the counter.
    pub fn packet_rates_by_counter(&self, load_balancer: &str) -> BTreeMap<&str, f64> {
        let Some((oldest, newest, seconds)) = self.oldest_and_newest_load_samples() else { return BTreeMap::new() };
        let find_load_balancer_index =
            |loads: &'_ Loads| loads.load_balancers.iter().position(|counts| counts.name == load_balancer);
        let (Some(old_index), Some(new_index)) = (find_load_balancer_index(oldest), find_load_balancer_index(newest))
        else {
            return BTreeMap::new();
        };
        let old_counters = &oldest.load_balancers[old_index].counters;
        let compute_packet_rate = |name: &str, count: &u64| {
            count.saturating_sub(old_counters.get(name).copied().unwrap_or(*count)) as f64 / seconds
        };
        newest.load_balancers[new_index]
            .counters
            .iter()
            .map(|(name, count)| (name.as_str(), compute_packet_rate(name, count)))
            .collect()
    }

    /// Returns the oldest load sample, the newest load sample, and the time between them in seconds. Returns `None`
    /// without two samples of different times.
    fn oldest_and_newest_load_samples(&self) -> Option<(&Loads, &Loads, f64)> {
        let (oldest, newest) = (self.load_samples.front()?, self.load_samples.back()?);
        let elapsed_s = newest.uptime_ms.saturating_sub(oldest.uptime_ms) as f64 / 1000.0;
        (elapsed_s > 0.0).then_some((oldest, newest, elapsed_s))
    }
}
