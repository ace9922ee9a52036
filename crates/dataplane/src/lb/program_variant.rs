//! Features that are compiled into the program. If they change, the program is loaded again.

use coreward_model::vlan::Vlan;

use super::{BroadcastLimitsByKind, LbStampingClock, LoadBalancerOptions};

/// Features of the program that the services and their tables need. On loading, the kernel removes the code of all
/// other features.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RequiredProgramFeatures {
    /// Placement rules that tables use, as bits `1 << enum placement_rule`.
    pub placement_rule_bits: u32,
    /// Consistency modes that services use, as bits `1 << enum consistency`.
    pub consistency_mode_bits: u32,
    /// Whether there is a TCP service with `timestamps = "off"`, whose packets carry no cookie.
    pub has_tcp_without_timestamps: bool,
    pub has_lb_stamping: bool,
    /// Whether a service is being migrated from or to another load balancer.
    pub has_migrating_service: bool,
    pub has_udp_service: bool,
    /// Forwarding modes that services use, as bits `1 << enum forwarding`.
    pub forwarding_mode_bits: u32,
    pub has_ipv6_service: bool,
}

impl RequiredProgramFeatures {
    /// Returns the features that `self` or `other` needs.
    pub fn union(self, other: Self) -> Self {
        Self {
            placement_rule_bits: self.placement_rule_bits | other.placement_rule_bits,
            consistency_mode_bits: self.consistency_mode_bits | other.consistency_mode_bits,
            has_tcp_without_timestamps: self.has_tcp_without_timestamps || other.has_tcp_without_timestamps,
            has_lb_stamping: self.has_lb_stamping || other.has_lb_stamping,
            has_migrating_service: self.has_migrating_service || other.has_migrating_service,
            has_udp_service: self.has_udp_service || other.has_udp_service,
            forwarding_mode_bits: self.forwarding_mode_bits | other.forwarding_mode_bits,
            has_ipv6_service: self.has_ipv6_service || other.has_ipv6_service,
        }
    }
}

/// Compile-time constants of a loaded program. If any of them changes, the program is loaded again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProgramVariant {
    pub required_features: RequiredProgramFeatures,
    pub counts_server_traffic: bool,
    /// Whether counter rows belong to CPUs instead of receive queues, as generic XDP requires.
    pub has_per_cpu_counters: bool,
    pub broadcast_limits: BroadcastLimitsByKind,
    pub lb_stamping_clock: LbStampingClock,
    /// Whether packets read the kernel's clock, so that connection table entries age without the daemon.
    pub packets_read_clock: bool,
    pub vlan_settings: ProgramVlanSettings,
}

impl ProgramVariant {
    /// Returns the variant with these options for a load balancer without services and servers.
    pub fn new(options: &LoadBalancerOptions) -> Self {
        Self {
            required_features: RequiredProgramFeatures::default(),
            counts_server_traffic: false,
            has_per_cpu_counters: false,
            broadcast_limits: options.broadcast_limits,
            lb_stamping_clock: options.lb_stamping_clock,
            packets_read_clock: options.packets_read_clock,
            vlan_settings: ProgramVlanSettings { vip_vlan: options.vip_vlan, has_server_vlan: false },
        }
    }
}

/// VLAN settings that are constants of a loaded program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ProgramVlanSettings {
    /// VLAN in which clients' packets to VIPs arrive.
    pub vip_vlan: Vlan,
    pub has_server_vlan: bool,
}

impl ProgramVlanSettings {
    pub fn uses_tags(self) -> bool {
        self.has_server_vlan || self.vip_vlan.is_tagged()
    }
}
