//! Drawing of the page from the model and the view.

use coreward_api::types::{LoadBalancer, ReportState, Server, ServerLoads, ServerState, Service, Status};
use coreward_model::statistics::mean;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use crate::model::PageModel;
use crate::view::{ServerListView, ServerSortOrder};

/// Maximum number of lines for each of the sections services, load balancers and warnings, if the page is too small for
/// all lines.
const MAX_MINOR_SECTION_LINES: usize = 4;
/// Width in columns of the part of a server's line that precedes the bars of its core loads.
const COLUMNS_BEFORE_CORES: u16 = 64;

/// Draws the page, and stores in `view` the number of servers that fit on it.
pub fn draw_page(frame: &mut Frame<'_>, model: &PageModel, view: &mut ServerListView) {
    let area = frame.area();
    let Some(status) = &model.status else {
        let message = model.request_problem.clone().unwrap_or_else(|| "asking the controller ...".to_owned());
        return frame.render_widget(Paragraph::new(message), area);
    };
    let warnings = status_warnings(status);
    let [services_height, balancers_height, warnings_height] = section_heights(
        [status.services.len() + 1, status.load_balancers.len() + 1, warnings.len()],
        status.servers.len(),
        area,
    );
    let layout = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(services_height),
        Constraint::Length(balancers_height),
        Constraint::Min(0),
        Constraint::Length(warnings_height),
        Constraint::Length(1),
    ]);
    let [header_area, services_area, balancers_area, servers_area, warnings_area, footer_area] = layout.areas(area);
    frame.render_widget(Paragraph::new(header_lines(model, status, view.sort_order)), header_area);
    frame.render_widget(services_table(status, services_area), services_area);
    frame.render_widget(load_balancers_table(model, status, balancers_area), balancers_area);
    view.visible_row_count = usize::from(servers_area.height.saturating_sub(1));
    view.first_visible_row = view.first_visible_row.min(status.servers.len().saturating_sub(view.visible_row_count));
    frame.render_widget(servers_table(model, status, *view, servers_area), servers_area);
    let warning_style = Style::new().fg(Color::Yellow);
    let warning_lines: Vec<Line<'_>> =
        warnings.into_iter().map(|warning| Line::styled(format!("! {warning}"), warning_style)).collect();
    frame.render_widget(Paragraph::new(warning_lines), warnings_area);
    frame.render_widget(Paragraph::new(footer_line(status, *view)), footer_area);
}

pub fn full_page_height(status: &Status) -> u16 {
    let line_count =
        6 + status.services.len() + status.load_balancers.len() + status_warnings(status).len() + status.servers.len();
    u16::try_from(line_count).unwrap_or(u16::MAX)
}

/// Returns the heights (lines) of the sections for services, load balancers and warnings. If everything fits, each
/// section gets the lines that it needs. Otherwise, each gets at most [`MAX_MINOR_SECTION_LINES`], and fewer on a small
/// page. Three lines are reserved for header and footer.
fn section_heights(wanted_section_lines: [usize; 3], server_count: usize, area: Rect) -> [u16; 3] {
    let mut free_line_count = usize::from(area.height).saturating_sub(3);
    let needed_line_count = wanted_section_lines.iter().sum::<usize>() + server_count + 1;
    let max_lines = if needed_line_count <= free_line_count { usize::MAX } else { MAX_MINOR_SECTION_LINES };
    wanted_section_lines.map(|line_count| {
        // At least half of the remaining lines must be left for servers.
        let height = line_count.min(max_lines).min(free_line_count / 2);
        free_line_count -= height;
        height as u16
    })
}

fn header_lines<'a>(model: &PageModel, status: &Status, sort_order: ServerSortOrder) -> Vec<Line<'a>> {
    let reporting_count = status.servers.iter().filter(|server| server.report_state == ReportState::Fresh).count();
    let core_loads: Vec<f64> =
        model.server_loads_by_name().values().flat_map(|server| server.core_loads.iter().copied()).collect();
    let highest_load = core_loads.iter().copied().fold(0.0, f64::max);
    let new_connection_rate: f64 = model.new_connection_rates_by_server().values().sum();
    let open_connection_count: u64 =
        model.server_loads_by_name().values().map(|server| u64::from(server.open_connections)).sum();
    let fleet_line = format!(
        "coreward  configuration {}, a report every {} ms, {reporting_count} of {} servers report, by {}",
        status.configuration_generation,
        status.report_interval_ms,
        status.servers.len(),
        sort_order.name()
    );
    let load_summary = format!(
        "{} cores, mean {:.0} %, highest {:.0} %; {} new connections/s, {open_connection_count} open",
        core_loads.len(),
        mean(&core_loads).unwrap_or(0.0) * 100.0,
        highest_load * 100.0,
        format_rate(new_connection_rate)
    );
    let load_or_problem_line = match &model.request_problem {
        Some(problem) => Line::styled(problem.clone(), Style::new().fg(Color::Red)),
        None => Line::raw(load_summary),
    };
    vec![Line::styled(fleet_line, Style::new().add_modifier(Modifier::BOLD)), load_or_problem_line]
}

fn footer_line<'a>(status: &Status, view: ServerListView) -> Line<'a> {
    let (server_count, first) = (status.servers.len(), view.first_visible_row);
    let last_row = (first + view.visible_row_count).min(server_count);
    let range_text = if server_count == 0 {
        String::new()
    } else {
        format!("servers {} to {last_row} of {server_count}; ", (first + 1).min(server_count))
    };
    let key_help = "q quit, arrows and PageUp/PageDown, order by l load, n name, c new connections";
    Line::styled(format!("{range_text}{key_help}"), Style::new().add_modifier(Modifier::DIM))
}

fn table_header_row<'a>(names: &[&'a str]) -> Row<'a> {
    Row::new(names.iter().map(|name| Cell::from(*name)).collect::<Vec<_>>())
        .style(Style::new().add_modifier(Modifier::UNDERLINED))
}

/// Returns the rows that fit into `height` - 1 lines. If rows are omitted, the last row contains their number.
fn truncate_rows<'a>(rows: Vec<Row<'a>>, height: u16) -> Vec<Row<'a>> {
    let (max_rows, row_count) = (usize::from(height.saturating_sub(1)), rows.len());
    if row_count <= max_rows || max_rows == 0 {
        return rows;
    }
    let omitted_rows_row = Row::new([Cell::from(format!("... {} more", row_count + 1 - max_rows))]);
    rows.into_iter().take(max_rows - 1).chain([omitted_rows_row]).collect()
}

fn services_table<'a>(status: &'a Status, area: Rect) -> Table<'a> {
    let build_service_row = |service: &'a Service| {
        let takes_new_connections = |state: ServerState| matches!(state, ServerState::Active | ServerState::Joining);
        let up = service.members.iter().filter(|member| takes_new_connections(member.state)).count();
        let count_style = if up == 0 { Style::new().fg(Color::Red) } else { Style::new() };
        Row::new([
            Cell::from(service.name.as_str()),
            Cell::from(service.address.to_string()),
            Cell::from(service.policy.as_str()),
            Cell::from(service.consistency.as_str()),
            Cell::from(format!("{up} of {}", service.members.len())).style(count_style),
            Cell::from(service.table_generation.to_string()),
        ])
    };
    let [name, policy, consistency, takes, table] = [14, 14, 11, 8, 8].map(Constraint::Length);
    let column_widths = [name, Constraint::Min(20), policy, consistency, takes, table];
    let rows = status.services.iter().map(build_service_row).collect();
    Table::new(truncate_rows(rows, area.height), column_widths).header(table_header_row(&[
        "service",
        "address",
        "policy",
        "consistency",
        "take new",
        "table",
    ]))
}

fn load_balancers_table<'a>(model: &PageModel, status: &'a Status, area: Rect) -> Table<'a> {
    let build_load_balancer_row = |balancer: &'a LoadBalancer| {
        let packet_rates = model.packet_rates_by_counter(&balancer.name);
        let sum_new_connection_rates = |has_counted_connections: &dyn Fn(&str) -> bool| {
            format_rate(
                packet_rates.iter().filter(|(name, _)| has_counted_connections(name)).map(|(_, rate)| rate).sum(),
            )
        };
        let (state, colour) = match (balancer.connected, balancer.alive) {
            (true, true) => ("connected", Color::Green),
            (true, false) => ("silent", Color::Red),
            (false, true) => ("disconnected", Color::Yellow),
            (false, false) => ("lost", Color::Red),
        };
        Row::new([
            Cell::from(balancer.name.as_str()),
            Cell::from(state).style(Style::new().fg(colour)),
            Cell::from(balancer.state.as_ref().map_or("-", |state| state.xdp_mode.as_str())),
            Cell::from(sum_new_connection_rates(&|_| true)),
            Cell::from(sum_new_connection_rates(&|name| name == "new_connection")),
            Cell::from(sum_new_connection_rates(&|name| name.starts_with("drop_"))),
        ])
    };
    let column_widths = [16, 13, 8, 11, 11, 11].map(Constraint::Length);
    let rows = status.load_balancers.iter().map(build_load_balancer_row).collect();
    Table::new(truncate_rows(rows, area.height), column_widths).header(table_header_row(&[
        "load balancer",
        "state",
        "XDP",
        "packets/s",
        "first/s",
        "drops/s",
    ]))
}

fn servers_table<'a>(model: &PageModel, status: &'a Status, view: ServerListView, area: Rect) -> Table<'a> {
    let (loads, rates) = (model.server_loads_by_name(), model.new_connection_rates_by_server());
    let new_connection_rate = |server: &Server| rates.get(server.name.as_str()).copied();
    let mean_load_of = |server: &Server| loads.get(server.name.as_str()).and_then(|loads| mean(&loads.core_loads));
    let mut servers: Vec<&'a Server> = status.servers.iter().collect();
    match view.sort_order {
        ServerSortOrder::Name => servers.sort_by(|a, b| a.name.cmp(&b.name)),
        ServerSortOrder::Load => {
            servers.sort_by(|a, b| mean_load_of(b).unwrap_or(-1.0).total_cmp(&mean_load_of(a).unwrap_or(-1.0)))
        }
        ServerSortOrder::NewConnections => servers
            .sort_by(|a, b| new_connection_rate(b).unwrap_or(-1.0).total_cmp(&new_connection_rate(a).unwrap_or(-1.0))),
    }
    let core_columns = usize::from(area.width.saturating_sub(COLUMNS_BEFORE_CORES));
    let build_server_row = |server: &'a Server| {
        server_row(server, loads.get(server.name.as_str()).copied(), new_connection_rate(server), core_columns)
    };
    let rows: Vec<Row<'a>> =
        servers.into_iter().skip(view.first_visible_row).take(view.visible_row_count).map(build_server_row).collect();
    let column_widths = [16, 10, 8, 8, 7, 5, 5].map(Constraint::Length).into_iter().chain([Constraint::Min(0)]);
    Table::new(rows, column_widths)
        .column_spacing(1)
        .header(table_header_row(&["server", "state", "open", "new/s", "report", "mean", "max", "cores"]))
}

fn server_row<'a>(
    server: &'a Server,
    loads: Option<&ServerLoads>,
    new_connection_rate: Option<f64>,
    core_columns: usize,
) -> Row<'a> {
    let core_loads = loads.map_or(&[][..], |loads| &loads.core_loads);
    // Agents of older versions only count all of the machine's connections.
    let open_connection_count = loads.map(|loads| loads.service_connections.unwrap_or(loads.open_connections.into()));
    let text_or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let format_percent = |load: f64| format!("{:.0} %", load * 100.0);
    let highest_load = core_loads.iter().copied().reduce(f64::max);
    let (age, colour) = match server.report_state {
        ReportState::Fresh => (format!("{} ms", server.report_age_ms), Color::Reset),
        ReportState::Stale => (format!("{} s", server.report_age_ms / 1000), Color::Red),
        ReportState::None => ("never".to_owned(), Color::Red),
    };
    let state_colour = match server.state {
        ServerState::Active => Color::Green,
        ServerState::Joining | ServerState::Draining => Color::Yellow,
        ServerState::Down => Color::Red,
        ServerState::Gone => Color::DarkGray,
    };
    Row::new([
        Cell::from(server.name.as_str()),
        Cell::from(server.state.name()).style(Style::new().fg(state_colour)),
        Cell::from(text_or_dash(open_connection_count.map(|open| open.to_string()))),
        Cell::from(text_or_dash(new_connection_rate.map(format_rate))),
        Cell::from(age).style(Style::new().fg(colour)),
        Cell::from(text_or_dash(mean(core_loads).map(format_percent))),
        Cell::from(text_or_dash(highest_load.map(format_percent))),
        Cell::from(load_bars(core_loads, core_columns)),
    ])
}

/// Returns one bar for each core. If there are more cores than columns, each bar shows the highest load in a group of
/// cores.
fn load_bars<'a>(core_loads: &[f64], core_columns: usize) -> Line<'a> {
    if core_loads.is_empty() || core_columns == 0 {
        return Line::default();
    }
    let cores_per_bar = core_loads.len().div_ceil(core_columns);
    let find_highest_load = |cores: &[f64]| cores.iter().copied().fold(0.0, f64::max);
    core_loads.chunks(cores_per_bar).map(|cores| load_bar(find_highest_load(cores))).collect::<Vec<_>>().into()
}

fn load_bar<'a>(load: f64) -> Span<'a> {
    const LOAD_BAR_CHARACTERS: [&str; 8] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
    let colour = match load {
        ..0.7 => Color::Green,
        0.7..0.9 => Color::Yellow,
        _ => Color::Red,
    };
    Span::styled(
        LOAD_BAR_CHARACTERS[((load * 8.0) as usize).min(LOAD_BAR_CHARACTERS.len() - 1)],
        Style::new().fg(colour),
    )
}

/// Returns a rate as text, such as "0.3", "12" or "3.4k".
fn format_rate(rate: f64) -> String {
    match rate {
        ..0.05 => "0".to_owned(),
        0.05..9.95 => format!("{rate:.1}"),
        9.95..9_999.5 => format!("{rate:.0}"),
        9_999.5..999_950.0 => format!("{:.1}k", rate / 1e3),
        _ => format!("{:.1}M", rate / 1e6),
    }
}

fn status_warnings(status: &Status) -> Vec<String> {
    let service_warnings = status
        .services
        .iter()
        .flat_map(|service| service.warnings.iter().map(|text| format!("{}: {text}", service.name)));
    let load_balancer_warnings = status.load_balancers.iter().flat_map(|load_balancer| {
        let warnings = load_balancer.state.iter().flat_map(|state| &state.warnings);
        warnings.map(|text| format!("{}: {text}", load_balancer.name))
    });
    let unavailable_servers =
        status.servers.iter().filter(|server| server.state != ServerState::Active && !server.state_reason.is_empty());
    let state_warnings =
        unavailable_servers.map(|server| format!("{}: {}: {}", server.name, server.state, server.state_reason));
    let server_warnings =
        status.servers.iter().flat_map(|server| server.warnings.iter().map(|text| format!("{}: {text}", server.name)));
    service_warnings.chain(load_balancer_warnings).chain(state_warnings).chain(server_warnings).collect()
}

#[cfg(test)]
mod tests;
