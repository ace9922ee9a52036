//! Features that are compiled into the program. A change of the features loads the program again.

use coreward_model::vlan::Vlan;

use super::{BroadcastLimits, LbStampingClock};

/// Features that the services and their tables need. The program is compiled without all other features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EnabledFeatures {
    /// Placement rules of the tables: bits 1 << `enum placement_rule`.
    pub rule_bits: u32,
    /// Consistency modes of the services: bits 1 << `enum consistency`.
    pub mode_bits: u32,
    /// Whether a TCP service has packets without a cookie.
    pub has_timestamps_off: bool,
    /// Whether a service uses LB-side stamping.
    pub has_lb_stamping: bool,
    /// Whether a service is in migration from or to another load balancer.
    pub has_transfer: bool,
    /// Whether a service uses UDP.
    pub has_udp: bool,
    /// Forwarding modes of the services: bits 1 << `enum forwarding`.
    pub forwarding_bits: u32,
    /// Whether a service has an IPv6 VIP.
    pub has_ipv6: bool,
}

impl EnabledFeatures {
    /// Returns the features that are enabled in `self` or `other`.
    pub fn union(self, other: Self) -> Self {
        Self {
            rule_bits: self.rule_bits | other.rule_bits,
            mode_bits: self.mode_bits | other.mode_bits,
            has_timestamps_off: self.has_timestamps_off || other.has_timestamps_off,
            has_lb_stamping: self.has_lb_stamping || other.has_lb_stamping,
            has_transfer: self.has_transfer || other.has_transfer,
            has_udp: self.has_udp || other.has_udp,
            forwarding_bits: self.forwarding_bits | other.forwarding_bits,
            has_ipv6: self.has_ipv6 || other.has_ipv6,
        }
    }
}

/// Constants of the loaded program. A change of a constant loads the program again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    pub features: EnabledFeatures,
    /// Whether packets and bytes are counted by server.
    pub counts_traffic: bool,
    /// Whether each CPU has a row of counters (for generic XDP), and not each receive queue.
    pub counters_by_cpu: bool,
    pub broadcast_limits: BroadcastLimits,
    pub lb_stamping_clock: LbStampingClock,
    /// Whether packets read the kernel's clock to age entries of the connection table.
    pub packets_read_clock: bool,
    pub vlans: VlansInUse,
}

/// VLAN settings that the program is compiled for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct VlansInUse {
    /// VLAN of the VIPs.
    pub vip: Vlan,
    /// Whether any server is in a VLAN.
    pub has_server_vlan: bool,
}

impl VlansInUse {
    pub fn is_used(self) -> bool {
        self.has_server_vlan || self.vip.is_tagged()
    }
}
