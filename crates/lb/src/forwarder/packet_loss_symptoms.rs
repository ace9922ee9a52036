//! Detects faults that only the counters of the last seconds reveal. These are frames that the driver dropped although
//! the program had sent them, and new connections that do not become established.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coreward_dataplane::clock::monotonic_time;
use coreward_dataplane::{ethtool, lb, veth};
use coreward_model::counter_growth::{COUNTER_GROWTH_WINDOW, RecentCounterSamples, most_handshakes_fail};
use coreward_model::tuple::TransportProtocol;
use coreward_wire::ServiceIndex;

use super::Forwarder;

#[derive(Default)]
pub(super) struct PacketLossSymptoms {
    recent_send_drops: RecentCounterSamples<1>,
    /// Number of frames that the driver has dropped since the device was created, although the program had sent them.
    pub send_drops_total: u64,
    recent_handshake_counters: BTreeMap<ServiceIndex, RecentCounterSamples<2>>,
    pub services_with_failing_handshakes: BTreeSet<ServiceIndex>,
    descriptions_by_symptom: BTreeMap<String, String>,
}

impl PacketLossSymptoms {
    pub fn symptom_descriptions(&self) -> impl Iterator<Item = &String> {
        self.descriptions_by_symptom.values()
    }
}

impl Forwarder {
    /// Updates the symptoms from the counters, once a second. Logs when a symptom begins or ends.
    pub(super) fn update_symptoms(&mut self) {
        let now = monotonic_time();
        let mut current_symptoms: BTreeMap<String, String> = self.failing_handshake_symptoms(now).into_iter().collect();
        current_symptoms.extend(self.send_drop_symptom(now));
        current_symptoms.extend(self.veth_peer_symptom());
        for (symptom, description) in &current_symptoms {
            if !self.symptoms.descriptions_by_symptom.contains_key(symptom) {
                tracing::warn!(
                    event = "symptom-found",
                    symptom = symptom,
                    problem = %description,
                    "the load balancer's counters show that packets are lost: run `coreward doctor` on this machine"
                );
            }
        }
        for symptom in self.symptoms.descriptions_by_symptom.keys().filter(|what| !current_symptoms.contains_key(*what))
        {
            tracing::info!(
                event = "symptom-gone",
                symptom = symptom,
                window_s = COUNTER_GROWTH_WINDOW.as_secs(),
                "for `window_s` seconds, the load balancer's counters have not shown this symptom of lost packets"
            );
        }
        self.symptoms.descriptions_by_symptom = current_symptoms;
    }

    fn send_drop_symptom(&mut self, now: Duration) -> Option<(String, String)> {
        let counters = ethtool::xdp_transmit_error_counters(&self.interface_name);
        let total_drop_count = counters.iter().map(|(_, count)| count).sum();
        self.symptoms.send_drops_total = total_drop_count;
        let [recent_drop_count] = self.symptoms.recent_send_drops.record_and_get_growth(now, [total_drop_count]);
        let counter_names: Vec<&str> = counters.iter().map(|(name, _)| name.as_str()).collect();
        let symptom_name = format!("{} drops frames that XDP sent", self.interface_name);
        let description = format!(
            "{symptom_name}: {recent_drop_count} in {} s ({}); see `coreward doctor`",
            COUNTER_GROWTH_WINDOW.as_secs(),
            counter_names.join(", ")
        );
        (recent_drop_count > 0).then_some((symptom_name, description))
    }

    fn veth_peer_symptom(&self) -> Option<(String, String)> {
        let interface_index = nix::net::if_::if_nametoindex(self.interface_name.as_str()).ok()?;
        let are_frames_lost = self.attached_xdp_mode == lb::AttachedXdpMode::Native
            && veth::peer_has_native_xdp(interface_index) == Some(false);
        let symptom_name = format!("the other end of the veth {} has no XDP program", self.interface_name);
        let description =
            format!("{symptom_name}: frames that XDP sends are dropped or wait there; see `coreward doctor`");
        are_frames_lost.then_some((symptom_name, description))
    }

    fn failing_handshake_symptoms(&mut self, now: Duration) -> Vec<(String, String)> {
        self.symptoms.recent_handshake_counters.retain(|index, _| self.services_by_index.contains_key(index));
        self.symptoms.services_with_failing_handshakes.clear();
        let mut symptoms = Vec::new();
        for (index, (service, lb_service_index)) in &self.services_by_index {
            if service.address.protocol != TransportProtocol::Tcp {
                continue;
            }
            let counters = self.load_balancer.service_counters(*lb_service_index);
            let syn_and_established_counts = [counters.syn_packet_count(), counters.established_packet_count()];
            let [syn_count, other_packet_count] = self
                .symptoms
                .recent_handshake_counters
                .entry(*index)
                .or_default()
                .record_and_get_growth(now, syn_and_established_counts);
            if most_handshakes_fail(syn_count, other_packet_count) {
                self.symptoms.services_with_failing_handshakes.insert(*index);
                let symptom_name = format!("service {}: most new connections do not become established", service.name);
                let description = format!(
                    "{symptom_name}: {syn_count} SYNs and {other_packet_count} other packets in {} s",
                    COUNTER_GROWTH_WINDOW.as_secs()
                );
                symptoms.push((symptom_name, description));
            }
        }
        symptoms
    }
}
