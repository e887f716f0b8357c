//! The kernel's BPF objects of the demo, as bpftool lists them.

use std::path::Path;

use anyhow::Context;

use super::stage::{BPFFS, Stage, each, files_below};

/// Programs, maps and the devices they are attached to, with their ids. Compared, shown in part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listing {
    /// `na_from_pod`: id, in the order of names.
    pub(super) programs: Vec<(String, u64)>,
    /// `na_link`: id, in the order of names.
    pub(super) maps: Vec<(String, u64)>,
    /// Device, hook, program name and id, in bpftool's order.
    pub(super) attached: Vec<[String; 4]>,
}

impl Listing {
    /// Asks bpftool.
    pub(super) fn read(stage: &Stage) -> anyhow::Result<Self> {
        let pins = files_below(Path::new(BPFFS))?;
        let (programs, maps): (Vec<_>, Vec<_>) = pins.iter().partition(|pin| pin.contains("/prog/"));
        let identified = |kind: &str, pins: Vec<&String>| {
            pins.into_iter()
                .map(|pin| {
                    let shown = stage.json(&format!("bpftool -j {kind} show pinned {pin}"))?;
                    let name = shown["name"].as_str().with_context(|| format!("{pin} has no name"))?;
                    let id = shown["id"].as_u64().with_context(|| format!("{pin} has no id"))?;
                    Ok((name.to_owned(), id))
                })
                .collect::<anyhow::Result<Vec<_>>>()
        };
        let net = stage.json("bpftool -j net")?;
        let hooks = each(&net).flat_map(|net| each(&net["tc"]));
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let attached = hooks.map(|hook| {
            // With a tcx link, bpftool calls it prog_id.
            let id = hook["id"].as_u64().or(hook["prog_id"].as_u64()).unwrap_or_default();
            [text(&hook["devname"]), text(&hook["kind"]), text(&hook["name"]), id.to_string()]
        });
        let attached = attached.collect();
        Ok(Self { programs: identified("prog", programs)?, maps: identified("map", maps)?, attached })
    }

    /// One line per kind of object, names with ids.
    pub(super) fn summary(&self) -> [[String; 2]; 3] {
        let ids = |objects: &[(String, u64)]| {
            let words: Vec<String> = objects.iter().map(|(name, id)| format!("{name} {id}")).collect();
            words.join("  ")
        };
        let maps = self.maps.split_at(self.maps.len().min(5));
        let more = if maps.1.is_empty() { String::new() } else { format!("  and {} more", maps.1.len()) };
        let mut devices: Vec<&str> = self.attached.iter().map(|[device, ..]| device.as_str()).collect();
        devices.dedup();
        [
            ["prog".to_owned(), ids(&self.programs)],
            ["map".to_owned(), ids(maps.0) + &more],
            ["net".to_owned(), format!("{} hooks on {} devices", self.attached.len(), devices.len())],
        ]
    }
}

/// How many entries the maps have that know about attachments.
pub(super) fn attachment_entries(stage: &Stage) -> anyhow::Result<usize> {
    let mut entries = 0;
    for map in ["na_link", "na_addr4", "na_addr6"] {
        let pin = files_below(Path::new(BPFFS))?.into_iter().find(|pin| pin.ends_with(&format!("/{map}")));
        let pin = pin.with_context(|| format!("{map} is not pinned"))?;
        entries += each(&stage.json(&format!("bpftool -j map dump pinned {pin}"))?).count();
    }
    Ok(entries)
}

/// Whether the kernel has freed all of a listing's programs and maps.
pub(super) fn is_gone(stage: &Stage, listing: &Listing) -> anyhow::Result<bool> {
    let programs = stage.json("bpftool -j prog show")?;
    let maps = stage.json("bpftool -j map show")?;
    // Listing a program array at the moment when its last user ends may make the kernel keep the array, empty,
    // forever: `prog_array_map_clear` (kernel/bpf/arraymap.c) takes a reference for work that is already queued.
    let alive = |all: &serde_json::Value, ours: &[(String, u64)]| {
        each(all)
            .filter(|object| object["type"] != "prog_array")
            .any(|object| ours.iter().any(|(_, id)| object["id"].as_u64() == Some(*id)))
    };
    Ok(!alive(&programs, &listing.programs) && !alive(&maps, &listing.maps))
}
