//! Features that are compiled into the program; a change loads it again.

use super::vlans::VlansInUse;
use super::{Broadcast, LbStampingClock};

/// Features that the services and their tables need. Others are not compiled in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EnabledFeatures {
    /// Bits 1 << `enum placement_rule`.
    pub rules: u32,
    /// Bits 1 << `enum consistency`.
    pub modes: u32,
    /// A service of TCP whose packets carry no cookie.
    pub timestamps_off: bool,
    /// A service that the load balancer stamps itself.
    pub timestamps_lb: bool,
    /// A service in migration.
    pub other_balancer: bool,
    /// A service of UDP.
    pub udp: bool,
    /// Bits 1 << `enum forwarding`.
    pub forwarding: u32,
    /// A service with an IPv6 VIP.
    pub ipv6: bool,
}

impl EnabledFeatures {
    /// Returns the union.
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

/// Constants of the loaded program; a change loads it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    pub in_use: EnabledFeatures,
    /// Packets and bytes are counted by server.
    pub traffic: bool,
    /// One row of counters per CPU instead of one per receive queue: for generic XDP.
    pub counters_by_cpu: bool,
    pub broadcast: Broadcast,
    pub lb_stamping_clock: LbStampingClock,
    /// Packets read the clock by which entries of the connection table age.
    pub packets_read_clock: bool,
    pub vlans: VlansInUse,
}
