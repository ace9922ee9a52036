//! Announces this load balancer's VIPs to a routing daemon (BIRD, FRR). For each VIP, it adds a route to a kernel table
//! that no rule uses. The daemon reads the table and announces its routes to the routers (docs/deployment.md has its
//! file).
//!
//! The kernel itself does not use these routes, so it neither answers for a VIP nor accepts its packets. It would do
//! both if the VIP were on a loopback device, and would then drop servers' replies through this machine as martians.
//! Like the data plane, the routes outlive this process. A restarted routing daemon therefore finds them, unlike
//! announcements through a control socket.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use anyhow::Context as _;
use rtnetlink::packet_route::link::{LinkFlags, LinkMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteType};
use rtnetlink::{Handle, RouteMessageBuilder};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_stream::StreamExt as _;

use crate::config::VipAnnouncementConfig;

/// Protocol number of the routes, as in `ip route`. Neither the kernel nor iproute2 assigns this number to a protocol.
const VIP_ROUTE_PROTOCOL: RouteProtocol = RouteProtocol::Other(174);
/// Interval between checks for changes that other programs have made to the routing table.
const ROUTE_TABLE_CHECK_INTERVAL: Duration = Duration::from_secs(10);

pub struct VipAnnouncer {
    netlink_handle: Handle,
    route_table_id: u32,
    announced_vips: BTreeSet<IpAddr>,
    last_route_read_at: Instant,
    netlink_task: AbortHandle,
}

/// VIPs that can be announced, and the reasons why the remaining VIPs cannot be announced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VipAnnouncementState {
    /// VIPs whose packets can be forwarded.
    pub announceable_vips: BTreeSet<IpAddr>,
    /// Reasons why configured VIPs are not announced.
    pub obstacles: Vec<String>,
}

impl VipAnnouncer {
    /// Returns an announcer that has read the VIP routes left by an earlier process. Fails when the kernel's routes
    /// cannot be read.
    pub async fn start(config: &VipAnnouncementConfig) -> anyhow::Result<Self> {
        let (connection, netlink_handle, _) =
            rtnetlink::new_connection().context("cannot open a netlink socket for routes")?;
        let netlink_task = tokio::spawn(connection).abort_handle();
        let mut announcer = Self {
            netlink_handle,
            route_table_id: config.table,
            announced_vips: BTreeSet::new(),
            last_route_read_at: Instant::now(),
            netlink_task,
        };
        announcer.read_own_routes().await?;
        Ok(announcer)
    }

    pub fn route_table_id(&self) -> u32 {
        self.route_table_id
    }

    pub fn announced_vip_count(&self) -> usize {
        self.announced_vips.len()
    }

    /// Announces exactly the `announceable_vips` VIPs and withdraws all others. Fails when the kernel rejects a route.
    pub async fn announce_vips(&mut self, announceable_vips: &BTreeSet<IpAddr>) -> anyhow::Result<()> {
        if self.last_route_read_at.elapsed() >= ROUTE_TABLE_CHECK_INTERVAL {
            self.read_own_routes().await?;
        }
        let withdrawn_vips: Vec<IpAddr> = self.announced_vips.difference(announceable_vips).copied().collect();
        for vip in withdrawn_vips {
            let delete_result =
                self.netlink_handle.route().del(build_vip_route(vip, self.route_table_id)?).execute().await;
            delete_result.with_context(|| format!("VIP {vip} cannot be withdrawn"))?;
            self.announced_vips.remove(&vip);
            tracing::info!(
                event = "vip-withdrawn",
                %vip,
                table = self.route_table_id,
                "the load balancer has deleted the route that announces the VIP"
            );
        }
        let new_vips: Vec<IpAddr> = announceable_vips.difference(&self.announced_vips).copied().collect();
        for vip in new_vips {
            let add_result =
                self.netlink_handle.route().add(build_vip_route(vip, self.route_table_id)?).replace().execute().await;
            add_result.with_context(|| format!("VIP {vip} cannot be announced"))?;
            self.announced_vips.insert(vip);
            tracing::info!(
                event = "vip-announced",
                %vip,
                table = self.route_table_id,
                "the load balancer has added the route that announces the VIP"
            );
        }
        Ok(())
    }

    /// Returns whether the network interface is up. Fails when it does not exist.
    pub async fn is_interface_up(&self, interface: &str) -> anyhow::Result<bool> {
        let links = self.netlink_handle.link().get().match_name(interface.to_owned()).execute();
        let mut link_stream = std::pin::pin!(links);
        let missing_device_message = || format!("interface {interface}: expected a device of this network namespace");
        let link: LinkMessage = link_stream.next().await.with_context(missing_device_message)??;
        Ok(link.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp))
    }

    async fn read_own_routes(&mut self) -> anyhow::Result<()> {
        let route_requests =
            [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        let mut announced_vips = BTreeSet::new();
        for request in route_requests {
            let routes = self.netlink_handle.route().get(request).execute();
            let mut route_stream = std::pin::pin!(routes);
            while let Some(route) = route_stream.next().await {
                let route = route.context("cannot read the kernel's routes")?;
                announced_vips.extend(announced_vip_in_route(&route, self.route_table_id));
            }
        }
        (self.announced_vips, self.last_route_read_at) = (announced_vips, Instant::now());
        Ok(())
    }
}

fn host_prefix_length(vip: IpAddr) -> u8 {
    if vip.is_ipv4() { 32 } else { 128 }
}

fn build_vip_route(vip: IpAddr, route_table_id: u32) -> anyhow::Result<RouteMessage> {
    let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(vip, host_prefix_length(vip))?;
    Ok(route.table_id(route_table_id).protocol(VIP_ROUTE_PROTOCOL).kind(RouteType::BlackHole).build())
}

impl Drop for VipAnnouncer {
    fn drop(&mut self) {
        self.netlink_task.abort();
    }
}

fn announced_vip_in_route(route: &RouteMessage, own_table_id: u32) -> Option<IpAddr> {
    let table_attribute = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table_id) => Some(*table_id),
        _ => None,
    });
    let route_table_id = table_attribute.unwrap_or(route.header.table.into());
    if route_table_id != own_table_id || route.header.protocol != VIP_ROUTE_PROTOCOL {
        return None;
    }
    let destination = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(vip)) => Some(IpAddr::from(*vip)),
        RouteAttribute::Destination(RouteAddress::Inet6(vip)) => Some(IpAddr::from(*vip)),
        _ => None,
    });
    destination.filter(|vip| route.header.destination_prefix_length == host_prefix_length(*vip))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_vips_are_own_routes_in_own_table() {
        for (vip, network_length) in [("10.200.0.1", 24), ("2001:db8::1", 32)] {
            let vip: IpAddr = vip.parse().unwrap();
            let announced_vip_for_route = |table, protocol, length| {
                let route_builder = RouteMessageBuilder::<IpAddr>::new().destination_prefix(vip, length).unwrap();
                announced_vip_in_route(&route_builder.table_id(table).protocol(protocol).build(), 7400)
            };
            let host_prefix_length = host_prefix_length(vip);
            assert_eq!(announced_vip_for_route(7400, VIP_ROUTE_PROTOCOL, host_prefix_length), Some(vip));
            assert_eq!(announced_vip_in_route(&build_vip_route(vip, 7400).unwrap(), 7400), Some(vip));
            assert_eq!(announced_vip_for_route(7401, VIP_ROUTE_PROTOCOL, host_prefix_length), None);
            assert_eq!(announced_vip_for_route(7400, RouteProtocol::Static, host_prefix_length), None);
            assert_eq!(announced_vip_for_route(7400, VIP_ROUTE_PROTOCOL, network_length), None);
        }
    }
}
