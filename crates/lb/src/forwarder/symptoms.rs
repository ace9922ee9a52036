//! Faults that only counters of the last seconds show: frames that the program sent and the driver dropped, and new
//! connections that do not become established.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_dataplane::clock::monotonic;
use coreward_dataplane::{ethtool, lb, veth};
use coreward_model::recent::{RecentCounters, WINDOW, handshakes_fail};
use coreward_model::tuple::Protocol;
use coreward_wire::ServiceIndex;

use super::Forwarder;

#[derive(Default)]
pub(super) struct Symptoms {
    send_drops: RecentCounters<1>,
    /// Number of frames that the program sent and the driver counted as dropped, since the device was created.
    pub send_drops_total: u64,
    handshake_counters: BTreeMap<ServiceIndex, RecentCounters<2>>,
    /// Services whose new connections do not become established.
    pub failing_services: BTreeSet<ServiceIndex>,
    /// Descriptions of the present symptoms by their short names.
    faults: BTreeMap<String, String>,
}

impl Symptoms {
    pub fn list(&self) -> impl Iterator<Item = &String> {
        self.faults.values()
    }
}

impl Forwarder {
    /// Updates the symptoms from the counters, once a second. Logs the start and the end of each symptom.
    pub(super) fn update_symptoms(&mut self) {
        let now = monotonic();
        let mut found: BTreeMap<String, String> = self.failing_handshakes(now).into_iter().collect();
        found.extend(self.new_send_drops(now));
        found.extend(self.veth_without_peer_program());
        for (what, words) in &found {
            if !self.symptoms.faults.contains_key(what) {
                tracing::warn!(
                    event = "symptom-found",
                    symptom = what,
                    problem = %words,
                    "the load balancer's counters show that packets are lost: run `coreward doctor` on this machine"
                );
            }
        }
        for what in self.symptoms.faults.keys().filter(|what| !found.contains_key(*what)) {
            tracing::info!(
                event = "symptom-gone",
                symptom = what,
                window_s = WINDOW.as_secs(),
                "the load balancer's counters no longer show this symptom of lost packets"
            );
        }
        self.symptoms.faults = found;
    }

    fn new_send_drops(&mut self, now: Duration) -> Option<(String, String)> {
        let counters = ethtool::xdp_send_errors(&self.interface);
        let total = counters.iter().map(|(_, count)| count).sum();
        self.symptoms.send_drops_total = total;
        let [dropped] = self.symptoms.send_drops.record_counters(now, [total]);
        let names: Vec<&str> = counters.iter().map(|(name, _)| name.as_str()).collect();
        let what = format!("{} drops frames that XDP sent", self.interface);
        let words =
            format!("{what}: {dropped} in {} s ({}); see `coreward doctor`", WINDOW.as_secs(), names.join(", "));
        (dropped > 0).then_some((what, words))
    }

    fn veth_without_peer_program(&self) -> Option<(String, String)> {
        let index = nix::net::if_::if_nametoindex(self.interface.as_str()).ok()?;
        let is_lost = self.attachment == lb::AttachedXdpMode::Native && veth::peer_has_xdp(index) == Some(false);
        let what = format!("the other end of the veth {} has no XDP program", self.interface);
        let words = format!("{what}: frames that XDP sends are dropped or wait there; see `coreward doctor`");
        is_lost.then_some((what, words))
    }

    fn failing_handshakes(&mut self, now: Duration) -> Vec<(String, String)> {
        self.symptoms.handshake_counters.retain(|index, _| self.services.contains_key(index));
        self.symptoms.failing_services.clear();
        let mut found = Vec::new();
        for (index, (service, place)) in &self.services {
            if service.address.protocol != Protocol::Tcp {
                continue;
            }
            let counters = self.balancer.counters(*place);
            let counts = [counters.syns(), counters.established_packets()];
            let [syns, others] =
                self.symptoms.handshake_counters.entry(*index).or_default().record_counters(now, counts);
            if handshakes_fail(syns, others) {
                self.symptoms.failing_services.insert(*index);
                let what = format!("service {}: most new connections do not become established", service.name);
                let words = format!("{what}: {syns} SYNs and {others} other packets in {} s", WINDOW.as_secs());
                found.push((what, words));
            }
        }
        found
    }
}
