//! Features that are compiled into the program. A change of the features loads the program again.

use coreward_model::vlan::Vlan;

use super::{BroadcastLimits, LbStampingClock};

/// Features that the services and their tables need. The program is compiled without all other features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EnabledFeatures {
    /// Placement rules of the tables: bits 1 << `enum placement_rule`.
    pub rules: u32,
    /// Consistency modes of the services: bits 1 << `enum consistency`.
    pub modes: u32,
    /// Whether a TCP service has packets without a cookie.
    pub timestamps_off: bool,
    /// Whether a service uses LB-side stamping.
    pub timestamps_lb: bool,
    /// Whether a service is in migration from or to another load balancer.
    pub other_balancer: bool,
    /// Whether a service uses UDP.
    pub udp: bool,
    /// Forwarding modes of the services: bits 1 << `enum forwarding`.
    pub forwarding: u32,
    /// Whether a service has an IPv6 VIP.
    pub ipv6: bool,
}

impl EnabledFeatures {
    /// Returns the features that are enabled in `self` or `other`.
    pub fn union(self, other: Self) -> Self {
        Self {
            rules: self.rules | other.rules,
            modes: self.modes | other.modes,
            timestamps_off: self.timestamps_off || other.timestamps_off,
            timestamps_lb: self.timestamps_lb || other.timestamps_lb,
            other_balancer: self.other_balancer || other.other_balancer,
            udp: self.udp || other.udp,
            forwarding: self.forwarding | other.forwarding,
            ipv6: self.ipv6 || other.ipv6,
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
