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

use crate::config::Announce;

/// Protocol number of the routes, as in `ip route`. Neither the kernel nor iproute2 assigns this number to a protocol.
const ROUTE_PROTOCOL: RouteProtocol = RouteProtocol::Other(174);
/// Interval between the checks whether other programs have changed the routing table.
const READ_INTERVAL: Duration = Duration::from_secs(10);

pub struct Announcer {
    handle: Handle,
    route_table_id: u32,
    announced_vips: BTreeSet<IpAddr>,
    last_read: Instant,
    netlink_task: AbortHandle,
}

/// VIPs that can be announced, and the reasons why others cannot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnnounceState {
    /// VIPs whose packets can be forwarded.
    pub announceable_vips: BTreeSet<IpAddr>,
    /// Reasons why the other VIPs are not announced.
    pub blocked_reasons: Vec<String>,
}

impl Announcer {
    /// Reads the routes that an earlier process added. Fails when the kernel does not show its routes.
    pub async fn start(config: &Announce) -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("cannot open a netlink socket for routes")?;
        let answers = tokio::spawn(connection).abort_handle();
        let mut announcer = Self {
            handle,
            route_table_id: config.table,
            announced_vips: BTreeSet::new(),
            last_read: Instant::now(),
            netlink_task: answers,
        };
        announcer.read().await?;
        Ok(announcer)
    }

    pub fn route_table_id(&self) -> u32 {
        self.route_table_id
    }

    pub fn announced_count(&self) -> usize {
        self.announced_vips.len()
    }

    /// Announces exactly the `wanted` VIPs and withdraws all others. Fails when the kernel rejects a route.
    pub async fn announce(&mut self, wanted: &BTreeSet<IpAddr>) -> anyhow::Result<()> {
        if self.last_read.elapsed() >= READ_INTERVAL {
            self.read().await?;
        }
        let gone: Vec<IpAddr> = self.announced_vips.difference(wanted).copied().collect();
        for vip in gone {
            let deleted = self.handle.route().del(vip_route(vip, self.route_table_id)?).execute().await;
            deleted.with_context(|| format!("VIP {vip} cannot be withdrawn"))?;
            self.announced_vips.remove(&vip);
            tracing::info!(
                event = "vip-withdrawn",
                %vip,
                table = self.route_table_id,
                "the load balancer has deleted the route that announces the VIP"
            );
        }
        let new: Vec<IpAddr> = wanted.difference(&self.announced_vips).copied().collect();
        for vip in new {
            let added = self.handle.route().add(vip_route(vip, self.route_table_id)?).replace().execute().await;
            added.with_context(|| format!("VIP {vip} cannot be announced"))?;
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
        let links = self.handle.link().get().match_name(interface.to_owned()).execute();
        let mut links = std::pin::pin!(links);
        let missing = || format!("interface {interface}: expected a device of this network namespace");
        let link: LinkMessage = links.next().await.with_context(missing)??;
        Ok(link.header.flags.contains(LinkFlags::Up | LinkFlags::LowerUp))
    }

    async fn read(&mut self) -> anyhow::Result<()> {
        let requests = [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()];
        let mut found = BTreeSet::new();
        for request in requests {
            let routes = self.handle.route().get(request).execute();
            let mut routes = std::pin::pin!(routes);
            while let Some(route) = routes.next().await {
                let route = route.context("cannot read the kernel's routes")?;
                found.extend(announced_vip(&route, self.route_table_id));
            }
        }
        (self.announced_vips, self.last_read) = (found, Instant::now());
        Ok(())
    }
}

fn host_prefix_length(vip: IpAddr) -> u8 {
    if vip.is_ipv4() { 32 } else { 128 }
}

fn vip_route(vip: IpAddr, table: u32) -> anyhow::Result<RouteMessage> {
    let route = RouteMessageBuilder::<IpAddr>::new().destination_prefix(vip, host_prefix_length(vip))?;
    Ok(route.table_id(table).protocol(ROUTE_PROTOCOL).kind(RouteType::BlackHole).build())
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.netlink_task.abort();
    }
}

fn announced_vip(route: &RouteMessage, table: u32) -> Option<IpAddr> {
    let table_attribute = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    let route_table_id = table_attribute.unwrap_or(route.header.table.into());
    if route_table_id != table || route.header.protocol != ROUTE_PROTOCOL {
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
    fn only_own_routes_in_the_own_table_are_announced_vips() {
        for (vip, network_length) in [("10.200.0.1", 24), ("2001:db8::1", 32)] {
            let vip: IpAddr = vip.parse().unwrap();
            let announced_by_route = |table, protocol, length| {
                let route_builder = RouteMessageBuilder::<IpAddr>::new().destination_prefix(vip, length).unwrap();
                announced_vip(&route_builder.table_id(table).protocol(protocol).build(), 7400)
            };
            let host_prefix_length = host_prefix_length(vip);
            assert_eq!(announced_by_route(7400, ROUTE_PROTOCOL, host_prefix_length), Some(vip));
            assert_eq!(announced_vip(&vip_route(vip, 7400).unwrap(), 7400), Some(vip));
            assert_eq!(announced_by_route(7401, ROUTE_PROTOCOL, host_prefix_length), None);
            assert_eq!(announced_by_route(7400, RouteProtocol::Static, host_prefix_length), None);
            assert_eq!(announced_by_route(7400, ROUTE_PROTOCOL, network_length), None);
        }
    }
}
