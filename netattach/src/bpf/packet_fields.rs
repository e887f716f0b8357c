//! Offsets of fields of the kernel's packets (`struct sk_buff`) that programs cannot read by a helper, taken
//! from the kernel's type information (BTF, Documentation/bpf/btf.rst; Linux 4.18, `CONFIG_DEBUG_INFO_BTF`).

use std::fs;
use std::sync::OnceLock;

use aya::programs::ProgramType;
use aya::sys::{BpfHelper, is_helper_supported};
use netattach_common::unfinished::{CAST_NAME, WINDOW};

use super::sys::{self, Instruction};

/// The type information of the running kernel.
const KERNEL: &str = "/sys/kernel/btf/vmlinux";
const HEADER: usize = 24;
const MAGIC: u16 = 0xeb9f;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;
/// Maximum nesting of structures: `sk_buff` has three levels.
const DEEPEST: u32 = 8;

/// Value of `NA_SKB` in `netattach-ebpf`: the offset of the first byte that is read; relative to it, the bit
/// at which `ip_summed` begins, and the byte offsets of `csum_start` (followed by `csum_offset`) and of
/// `mac_header`.
pub(super) type Fields = [u16; 4];

/// The running kernel's type information about packets.
#[derive(Debug, Clone, Copy)]
struct Described {
    fields: Fields,
    /// BTF id of the function by which programs get a packet's structure, if the kernel has it.
    cast: Option<u32>,
}

/// The fields of the running kernel; `None`: it has no type information, or programs may not read its memory
/// (lockdown).
pub(super) fn of_kernel() -> Option<Fields> {
    described().map(|it| it.fields)
}

/// BTF id of the function by which a program reads these fields in place, if the kernel accepts such a
/// program.
pub(super) fn cast_for(fields: Fields) -> Option<u32> {
    // Determined once: what a kernel accepts does not change.
    static CAST: OnceLock<Option<u32>> = OnceLock::new();
    let may_read = |cast: &u32| sys::load_classifier("na_cast", &reads_in_place(*cast, fields)).is_ok();
    *CAST.get_or_init(|| described()?.cast.filter(may_read))
}

fn described() -> Option<Described> {
    static DESCRIBED: OnceLock<Option<Described>> = OnceLock::new();
    *DESCRIBED.get_or_init(|| {
        let helper = BpfHelper::BPF_FUNC_probe_read_kernel;
        let may_read = is_helper_supported(ProgramType::SchedClassifier, helper).unwrap_or(false);
        let btf = may_read.then(|| fs::read(KERNEL).ok()).flatten()?;
        let types = Types::of(&btf)?;
        Some(Described { fields: fields(&types)?, cast: types.named(FUNCTION, CAST_NAME.as_bytes()) })
    })
}

/// A program that reads the fields in place as `na_unfinished` in `netattach-ebpf` does.
fn reads_in_place(cast: u32, [first, summed, start, mac]: Fields) -> [Instruction; 7] {
    /// `BPF_JMP | BPF_CALL`, with `BPF_PSEUDO_KFUNC_CALL` as the source register: context in register 1,
    /// result in register 0.
    const CALL: (u8, u8) = (0x85, 2 << 4);
    /// `BPF_LDX | BPF_MEM | BPF_B` and `BPF_H`: into register 1, from the address in register 0.
    const BYTE: (u8, u8) = (0x71, 1);
    const NUMBER: (u8, u8) = (0x69, 1);
    /// `BPF_ALU | BPF_MOV`, a constant into register 0; `BPF_JMP | BPF_EXIT`.
    const SET: (u8, u8) = (0xb4, 0);
    const EXIT: (u8, u8) = (0x95, 0);
    let with = |(code, registers), offset: u16, constant: u32| Instruction {
        code,
        registers,
        offset: offset.cast_signed(),
        constant: constant.cast_signed(),
    };
    let read = |how, at: u16| with(how, first.saturating_add(at), 0);
    [
        with(CALL, 0, cast),
        read(BYTE, summed / 8),
        read(NUMBER, start),
        read(NUMBER, start.saturating_add(2)),
        read(NUMBER, mac),
        with(SET, 0, 0),
        with(EXIT, 0, 0),
    ]
}

/// Finds the fields in type information.
fn fields(types: &Types<'_>) -> Option<Fields> {
    let packet = types.named(STRUCT, b"sk_buff")?;
    let find = |name: &[u8]| types.bit_of(packet, name, DEEPEST);
    let whole = |bits: u32| bits.is_multiple_of(8).then_some(bits / 8);
    let (summed, start) = (find(b"ip_summed")?, whole(find(b"csum_start")?)?);
    let (offset, mac) = (whole(find(b"csum_offset")?)?, whole(find(b"mac_header")?)?);
    let first = (summed / 8).min(start).min(mac);
    let last = (summed / 8 + 1).max(start + 4).max(mac + 2);
    // `ip_summed` must be two bits of one byte; the numbers of 16 bits must be adjacent and aligned.
    let fits = summed % 8 < 7 && offset == start + 2 && last - first <= WINDOW as u32 && first > 0;
    let aligned = (start - first).is_multiple_of(2) && (mac - first).is_multiple_of(2);
    let narrow = |number: u32| u16::try_from(number).ok();
    let fields = [narrow(first)?, narrow(summed - first * 8)?, narrow(start - first)?, narrow(mac - first)?];
    (fits && aligned).then_some(fields)
}

/// Structures and unions of type information, by type id.
struct Types<'b> {
    types: &'b [u8],
    strings: &'b [u8],
    /// Offset of each type in `types`; the first type has id 1.
    begins: Vec<usize>,
}

impl<'b> Types<'b> {
    /// `None`: the data is not BTF in this machine's byte order, or truncated.
    fn of(btf: &'b [u8]) -> Option<Self> {
        let magic = u16::from_ne_bytes(btf.get(..2)?.try_into().ok()?);
        let header = word(btf, 4)? as usize;
        if magic != MAGIC || header < HEADER {
            return None;
        }
        let section = |offset: usize, length: usize| {
            let begin = header.checked_add(word(btf, offset)? as usize)?;
            btf.get(begin..begin.checked_add(word(btf, length)? as usize)?)
        };
        let (types, strings) = (section(8, 12)?, section(16, 20)?);
        let mut begins = Vec::new();
        let mut at = 0;
        while at < types.len() {
            begins.push(at);
            let info = word(types, at + 4)?;
            at = at.checked_add(12 + length_behind(kind(info), info & 0xffff)?)?;
        }
        Some(Self { types, strings, begins })
    }

    /// The id of the type of that kind and name.
    fn named(&self, wanted: u32, name: &[u8]) -> Option<u32> {
        let is_it = |at: &usize| {
            word(self.types, at + 4).is_some_and(|info| kind(info) == wanted)
                && word(self.types, *at).is_some_and(|offset| self.is_name(offset, name))
        };
        u32::try_from(self.begins.iter().position(is_it)? + 1).ok()
    }

    /// The bit offset of a structure's member of that name, including members of its unnamed structures.
    fn bit_of(&self, structure: u32, name: &[u8], depth: u32) -> Option<u32> {
        let at = *self.begins.get((structure as usize).checked_sub(1)?)?;
        let info = word(self.types, at + 4)?;
        if ![STRUCT, UNION].contains(&kind(info)) {
            return None;
        }
        (0..(info & 0xffff) as usize).find_map(|member| {
            let at = at + 12 + member * 12;
            let [named, of, place] = [0, 4, 8].map(|field| word(self.types, at + field));
            let (named, of, place) = (named?, of?, place?);
            // With that flag the upper byte is the width of a bit field.
            let bit = if info >> 31 == 1 { place & 0x00ff_ffff } else { place };
            match named {
                0 if depth > 0 => self.bit_of(of, name, depth - 1)?.checked_add(bit),
                _ => self.is_name(named, name).then_some(bit),
            }
        })
    }

    fn is_name(&self, offset: u32, name: &[u8]) -> bool {
        let there = self.strings.get(offset as usize..).and_then(|rest| rest.strip_prefix(name));
        there.is_some_and(|rest| rest.first() == Some(&0))
    }
}

/// Bytes after the twelve that every type has; `None`: the kind is unknown.
fn length_behind(kind: u32, count: u32) -> Option<usize> {
    let each = match kind {
        // BTF_KIND_PTR, FWD, TYPEDEF, VOLATILE, CONST, RESTRICT, FUNC, FLOAT, TYPE_TAG.
        2 | 7..=12 | 16 | 18 => return Some(0),
        // INT, VAR, DECL_TAG.
        1 | 14 | 17 => return Some(4),
        // ARRAY.
        3 => return Some(12),
        // ENUM, FUNC_PROTO.
        6 | 13 => 8,
        // DATASEC, ENUM64.
        STRUCT | UNION | 15 | 19 => 12,
        _ => return None,
    };
    Some(count as usize * each)
}

fn kind(info: u32) -> u32 {
    info >> 24 & 0x1f
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Type information with these types and strings.
    fn description(types: &[u32], strings: &[u8]) -> Vec<u8> {
        let types: Vec<u8> = types.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let header = [HEADER as u32, 0, types.len() as u32, types.len() as u32, strings.len() as u32];
        let mut btf: Vec<u8> = MAGIC.to_ne_bytes().into_iter().chain([1, 0]).collect();
        btf.extend(header.iter().flat_map(|word| word.to_ne_bytes()));
        btf.extend(types);
        btf.extend(strings);
        btf
    }

    const STRINGS: &[u8] = b"\0sk_buff\0ip_summed\0csum_start\0csum_offset\0mac_header\0";

    /// Packets with the checksum at that byte, in a union within a structure that begins at byte 128, as in
    /// the kernel; with bit fields.
    fn packets(sum_at: u32) -> Vec<u8> {
        let [packet, summed, start, offset, mac]: [u32; 5] = [1, 9, 19, 30, 42];
        let many = |kind: u32, count: u32, bits: bool| u32::from(bits) << 31 | kind << 24 | count;
        description(
            &[
                // 1: a number.
                [0, 1 << 24, 2, 16].as_slice(),
                // 2: the structure with the two parts of the checksum; 3: the union that contains it.
                &[0, many(STRUCT, 2, false), 4, start, 1, 0, offset, 1, 16],
                &[0, many(UNION, 1, false), 4, 0, 2, 0],
                // 4: the unnamed structure.
                &[0, many(STRUCT, 3, true), 64, summed, 1, 2 << 24 | 5, 0, 3, sum_at * 8, mac, 1, 54 * 8],
                // 5: the packet.
                &[packet, many(STRUCT, 1, false), 224, 0, 4, 128 * 8],
            ]
            .concat(),
            STRINGS,
        )
    }

    #[test]
    fn members_are_found_within_structures_without_names() {
        let fields = |btf: &[u8]| Types::of(btf).as_ref().and_then(fields);
        assert_eq!(fields(&packets(16)), Some([128, 5, 16, 54]));
        // Outside the bytes that are read at once; not aligned; not described.
        assert_eq!(fields(&packets(62)), None);
        assert_eq!(fields(&packets(17)), None);
        assert_eq!(fields(&description(&[0, 1 << 24, 2, 16], STRINGS)), None);
        assert_eq!(fields(&packets(16)[..80]), None);
    }

    #[test]
    fn the_running_kernel_says_where_its_packets_have_them() {
        let [first, summed, start, mac] = of_kernel().expect("the kernel describes its types");
        assert!(first < 224 && summed / 8 < 64 && start < 61 && mac < 63, "{first} {summed} {start} {mac}");
    }

    /// Linux 6.2 has the function. A kernel without it only makes programs slower.
    #[test]
    fn a_kernel_that_has_the_function_lets_programs_read_in_place() {
        let fields = of_kernel().expect("the kernel describes its types");
        let btf = fs::read(KERNEL).unwrap();
        let number = Types::of(&btf).unwrap().named(FUNCTION, CAST_NAME.as_bytes());
        assert_eq!(cast_for(fields), number);
        let [first, summed, start, mac] = fields;
        // An offset without a field is refused.
        let Some(number) = number else { return };
        let wrong = [first, summed, start, mac + 1];
        assert!(sys::load_classifier("na_cast", &reads_in_place(number, wrong)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes: Vec<u8>, cut: u16, flip in 0_usize..400, by: u8) {
            let fields = |btf: &[u8]| Types::of(btf).as_ref().and_then(fields);
            let _ = fields(&bytes);
            let mut whole = packets(16);
            let at = flip % whole.len();
            whole[at] ^= by;
            let _ = fields(&whole);
            whole.truncate(cut.into());
            let _ = fields(&whole);
        }
    }
}
