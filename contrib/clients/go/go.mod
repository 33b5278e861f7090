module sbus

go 1.19
